"""Texts of the tiny pairs, in bfloat16, against plain decoding's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang_dflash.plan.settings import DETERMINISTIC_FLAG, REPLAY_SWITCH
from tests.support.generation import BF16_GAP, Answer, assert_nothing_leaked, divergence, flush, generate_all, tops_of
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import (
    BFLOAT16,
    RANDOM_WIDTHS,
    WIDE,
    Server,
    draft_arguments,
    running,
    strict,
    target_arguments,
    worker_info,
)
from tools.gpu.call import Job

GIB = 6.0
# Of the slice; and no graphs of prefills, whose capture takes longer than these prefills.
FLAGS = ("--mem-fraction-static", "0.6", "--disable-prefill-cuda-graph")
TRITON = ("--attention-backend", "triton", "--sampling-backend", "pytorch")
DRAFT_TRITON = ("--speculative-draft-attention-backend", "triton")
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 8}
REPLAYED, KEPT = {REPLAY_SWITCH: "1"}, {REPLAY_SWITCH: "0"}
CACHED = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")
# Kind -> sampling parameters: what else runs where every wait raises.
REQUESTS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
}


@dataclass(frozen=True)
class Arm:
    """A way to serve a pair under our worker: flags, environment and further requests."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    requests: Mapping[str, dict[str, Any]] = field(default_factory=dict)


ARMS = {
    "kept": Arm((), KEPT),
    "replayed, random widths, copies": Arm((*RANDOM_WIDTHS, *WIDE), REPLAYED),
    "random widths, waits raise": Arm(RANDOM_WIDTHS, {"SGLANG_DFLASH_FORBID_SYNC": "2"}, REQUESTS),
    "random widths, copies": Arm((*RANDOM_WIDTHS, *WIDE)),
    "planned": Arm(),
    "eager": Arm(("--disable-cuda-graph",)),
    "without overlap": Arm(("--disable-overlap-schedule",)),
    "prefix hits": Arm(CACHED, REPLAYED),
    "padding rows": Arm(("--cuda-graph-bs-decode", "3"), REPLAYED),
    "draft window": Arm(("--speculative-draft-window-size", "64"), REPLAYED),
}
# What the call runs; tests/gpu runs more.
CHOSEN = {
    "tiny-hybrid": ("kept", "replayed, random widths, copies", "random widths, waits raise"),
    "tiny-dense": ("random widths, copies",),
    "tiny-moe": ("planned",),
}
EXACT = "exact"


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
    def serve(self, job: Job, drafter: tuple[str, ...], *flags: str, **environment: str) -> Iterator[Server]:
        device = (*FLAGS, *TRITON, *(DRAFT_TRITON if drafter else ())) if job.call.real else ()
        command = (*target_arguments(self.pair, BFLOAT16), *drafter, *device, *self.flags, *flags)
        with running(job.folder, *command, **{**environment, **job.slice}) as server:
            yield server

    def decode_plainly(self, job: Job) -> None:
        try:
            with self.serve(job, ()) as server:
                self.plain += generate_all(server, self.inputs, 8, self.tokens, **LOGPROBS)
                flush(server)
                again = generate_all(server, self.inputs, 1, self.tokens, **LOGPROBS)
            wrong = sum(one.tokens != other.tokens for one, other in zip(self.plain, again, strict=True))
            job.row("texts", texts=len(again), **{"bits" if self.exact else "near_ties": wrong})
        finally:
            self.ready.set()

    def speculate(self, arm: Arm, job: Job) -> None:
        """Generate with eight requests at once, then one, and compare."""
        environment = {**arm.environment, **(strict() if "SGLANG_DFLASH_FORBID_SYNC" in arm.environment else {})}
        found = list[Answer]()
        with self.serve(job, draft_arguments(self.pair), *arm.flags, **environment) as server:
            for concurrency in (8, 1):
                if not set(CACHED) <= set(arm.flags):  # otherwise the second round must find the first round's prefixes
                    flush(server)
                found += generate_all(server, self.inputs, concurrency, self.tokens, **(LOGPROBS if self.exact else {}))
            for sampling in arm.requests.values():
                generate_all(server, self.inputs, 8, self.tokens, sampling_params=sampling)
            info = worker_info(server)
            assert_nothing_leaked(server)
        self.ready.wait()
        assert self.plain, "plain decoding has no texts to compare with"
        assert info["exact"] is self.exact, info
        job.row(
            "texts",
            **self.compared(found),
            **{"states": info["states"], "accept": info["mean_accept_length"], "widths": info["steps_by_width"]},
        )

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


def jobs(pair: str, arms: tuple[str, ...], real: bool, exact: bool = False) -> list[Job]:
    """Return the jobs of a pair: plain decoding, then its arms."""
    sizes = ((16, 64, 96) if exact else (32, 128, 96)) if real else (2, 12, 24)
    texts = Texts(pair, *sizes, exact=exact)
    prefix = f"{EXACT} " if exact else ""
    bodies = {"plain": texts.decode_plainly, **{name: partial(texts.speculate, ARMS[name]) for name in arms}}
    return [
        Job(f"{pair} {prefix}{name}", GIB, body, "texts", {"pair": pair, "arm": f"{prefix}{name}"})
        for name, body in bodies.items()
    ]
