"""Texts of the tiny pairs, in bfloat16, against plain decoding's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from sglang_dflash.launch.settings import DETERMINISTIC_FLAG, ONE_FORWARD_SWITCH
from tests.support import servers
from tests.support.generation import BF16_GAP, Answer, assert_nothing_leaked, divergence, flush, generate_all, tops_of
from tests.support.prompts import corpus, random_prompts
from tools.gpu.call import Job

GIB = 10.0
# Of the slice; and no graphs of prefills, whose capture takes longer than these prefills.
FLAGS = ("--mem-fraction-static", "0.6", "--disable-prefill-cuda-graph")
TRITON = ("--attention-backend", "triton", "--sampling-backend", "pytorch")
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 8}
# Sampling parameters: what else runs where every wait raises.
OTHERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
)


class Arm(NamedTuple):
    """A way to serve a pair under our worker: flags, environment, and sampling parameters of further requests.

    With ``caches`` the second round of prompts must find the first round's prefixes.
    """

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = MappingProxyType({})
    others: tuple[dict[str, Any], ...] = ()
    caches: bool = False


WIDTHS, COPIES = servers.RANDOM_WIDTHS, (*servers.RANDOM_WIDTHS, *servers.WIDE)
STRICT = Arm(WIDTHS, servers.strict(), OTHERS)
ONE_FORWARD = {**servers.strict(), ONE_FORWARD_SWITCH: "1"}
# slots for the tails of all prompts
_WINDOW = ("--speculative-draft-window-size", "64", "--max-running-requests", "32")
WINDOWED = Arm(_WINDOW, servers.strict(), OTHERS, caches=True)
# What the call compares; in exact mode EXACT.
CHOSEN = {
    "tiny-hybrid": {
        "random widths, copies": Arm(COPIES),
        "random widths, waits raise": STRICT,
        "one forward, random widths, copies, waits raise": Arm(COPIES, ONE_FORWARD, OTHERS),
        "prefix hits": Arm(caches=True),
        "draft window, prefix hits, waits raise": WINDOWED,
        "one forward, draft window, prefix hits, waits raise": WINDOWED._replace(environment=ONE_FORWARD),
    },
    "tiny-dense": {"random widths, copies": Arm(COPIES)},
    "tiny-moe": {"planned": Arm()},
}
EXACT = {"planned": Arm()}
FA3 = {"fa3, random widths, copies": Arm((*COPIES, "--attention-backend", "fa3"))}  # where its library is


@dataclass(eq=False)
class Texts:
    """Prompts of a pair and their plain texts, which the servers of its arms are compared with.

    Attributes:
        number, tokens, length: of texts, new tokens and tokens of a prompt.
        exact: in exact mode; random prompts too, and log-probabilities are compared bit by bit.
    """

    pair: str
    number: int
    tokens: int
    length: int
    exact: bool = False
    plain: list[Answer] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    @property
    def inputs(self) -> list[list[int]]:
        found = [prompt[-self.length :] for prompt in corpus(self.pair, self.number)]
        return found + (random_prompts(self.pair, self.number) if self.exact else [])

    @property
    def flags(self) -> tuple[str, ...]:
        experts = ("--moe-runner-backend", "triton") if self.pair == "tiny-moe" else ()
        return (DETERMINISTIC_FLAG, *experts) if self.exact else ()

    @contextlib.contextmanager
    def serve(self, job: Job, drafter: tuple[str, ...], *flags: str, **environment: str) -> Iterator[servers.Server]:
        device = (*FLAGS, *TRITON) if job.call.real else ()
        command = (*servers.target_arguments(self.pair, servers.BFLOAT16), *drafter, *device, *self.flags, *flags)
        with servers.running(job.folder, *command, **{**environment, **job.slice}) as server:
            yield server

    def decode_plainly(self, job: Job) -> dict[str, Any]:
        try:
            with self.serve(job, ()) as server:
                self.plain += generate_all(server, self.inputs, 8, self.tokens, **LOGPROBS)
                flush(server)
                again = generate_all(server, self.inputs, 1, self.tokens, **LOGPROBS)
            wrong = sum(one.tokens != other.tokens for one, other in zip(self.plain, again, strict=True))
            return {"texts": len(again), "bits" if self.exact else "near_ties": wrong}
        finally:
            self.ready.set()

    def speculate(self, arm: Arm, job: Job) -> dict[str, Any]:
        """Generate with eight requests at once, then one, and compare."""
        found = list[Answer]()
        with self.serve(job, servers.draft_arguments(self.pair), *arm.flags, **arm.environment) as server:
            for concurrency in (8, 1):
                if not arm.caches:
                    flush(server)
                found += generate_all(server, self.inputs, concurrency, self.tokens, **(LOGPROBS if self.exact else {}))
            for sampling in arm.others:
                generate_all(server, self.inputs, 8, self.tokens, sampling_params=sampling)
            info = servers.worker_info(server)
            assert_nothing_leaked(server)
        self.ready.wait()
        assert self.plain, "plain decoding has no texts to compare with"
        assert info["exact"] is self.exact, info
        cached = sum(answer.meta["cached_tokens"] > 0 for answer in found)
        assert cached or not (arm.caches and job.call.real), "no prefix was hit"  # elsewhere prompts are too short
        return {**self.compared(found), "accept": info["mean_accept_length"], "widths": info["steps_by_width"]}

    def compared(self, found: list[Answer]) -> dict[str, Any]:
        """Count texts, and those that differ; ``error`` has the first that is wrong."""
        near_ties, wrong, bits = 0, list[str](), 0
        for ours, plain in zip(found, 2 * self.plain, strict=True):
            try:
                near_ties += divergence(ours.tokens, plain.tokens, tops_of(plain), BF16_GAP) is not None
            except AssertionError as error:
                wrong.append(str(error))
            bits += self.exact and (ours.tokens, reported(ours)) != (plain.tokens, reported(plain))
        counts = {"texts": len(found), "near_ties": near_ties, "wrong": len(wrong)}
        counts |= {"bits": bits} if self.exact else {}
        failed = wrong or ["bits differ"] * bits
        return {**counts, **({"error": failed[0]} if failed else {})}


def reported(answer: Answer) -> list[Any]:
    """Return every reported log-probability with its token."""
    chosen, tops = answer.meta["output_token_logprobs"], answer.meta["output_top_logprobs"]
    return [[(value, token) for value, token, *_ in position] for position in (chosen, *tops)]


def jobs(pair: str, arms: Mapping[str, Arm], real: bool, exact: bool = False) -> list[Job]:
    """Return the jobs of a pair: plain decoding, then its arms."""
    texts = Texts(pair, *((16, 64, 96) if exact else (32, 128, 96)) if real else (2, 12, 24), exact=exact)
    bodies = {"plain": texts.decode_plainly, **{name: partial(texts.speculate, arm) for name, arm in arms.items()}}
    named = {f"exact {name}" if exact else name: body for name, body in bodies.items()}
    return [Job(f"{pair} {arm}", GIB, body, "texts", {"pair": pair, "arm": arm}) for arm, body in named.items()]
