"""Exact mode: bfloat16 text and log-probabilities are plain decoding's, bit by bit, on the CPU platform.

Where two servers found the same prefix in their caches: another one is prefilled from another position, and rounds
otherwise. Chunks shared by requests depend on arrival, so no cell has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.plan.settings import DETERMINISTIC_FLAG, REPLAY_SWITCH
from tests.serving.matrix import PAGED, STRATEGY, SYNC
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate_all
from tests.support.pair_servers import BFLOAT16, RANDOM_WIDTHS, dflash_server, plain_server, worker_info
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import Server

pytestmark = pytest.mark.engine

EXACT = (*BFLOAT16, DETERMINISTIC_FLAG)
WINDOW = ("--speculative-draft-window-size", "24")
TOP = {"return_logprob": True, "top_logprobs_num": 4}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
NEW_TOKENS = 64
# Flags of both servers, of the drafting one alone, and its environment.
Arm = tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]
EVERYTHING: Arm = ((), (*RANDOM_WIDTHS, "--speculative-draft-window-size", "48"), {})
ARMS: list[tuple[str, Arm]] = [
    ("tiny-hybrid", ((), (), {REPLAY_SWITCH: "0"})),
    ("tiny-hybrid", ((), RANDOM_WIDTHS, {REPLAY_SWITCH: "0"})),
    ("tiny-hybrid", ((STRATEGY, "extra_buffer"), RANDOM_WIDTHS, {REPLAY_SWITCH: "1"})),
    ("tiny-hybrid", ((*SYNC, *PAGED, STRATEGY, "extra_buffer_lazy"), (), {REPLAY_SWITCH: "1"})),
    ("tiny-hybrid", ((*SYNC, STRATEGY, "no_buffer"), WINDOW, {"SGLANG_DFLASH_COPIES": "1"})),
    ("tiny-dense", EVERYTHING),
    ("tiny-moe", ((), (), {})),
    ("tiny-moe", EVERYTHING),
]


def rounds(server: Server, pair: str) -> Iterator[Answer]:
    """Greedy text together, alone with prefix hits, and seeded text."""
    inputs = [*corpus(pair, 16), *random_prompts(pair, 16)]
    flush(server)
    yield from generate_all(server, inputs, 8, NEW_TOKENS, **TOP)
    yield from generate_all(server, inputs[:4], 1, NEW_TOKENS, **TOP)
    flush(server)
    for number, prompt in enumerate(inputs[8:24]):
        yield from generate_all(server, [prompt], 1, 32, **TOP, sampling_params={**SEEDED, "sampling_seed": number})


def numbers(answer: Answer) -> list[Any]:
    meta = answer.meta
    return [[(value, token) for value, token, *_ in top] for top in meta["output_top_logprobs"]]


def assert_exact(found: Sequence[Answer], plain: Sequence[Answer]) -> int:
    """Compare tokens and log-probabilities; return how many generations were comparable."""
    alike = [
        (ours, answer)
        for ours, answer in zip(found, plain, strict=True)
        if ours.meta["cached_tokens"] == answer.meta["cached_tokens"]
    ]
    assert [ours.tokens for ours, _ in alike] == [answer.tokens for _, answer in alike]
    assert [numbers(ours) for ours, _ in alike] == [numbers(answer) for _, answer in alike]
    assert len(alike) > 0.8 * len(found)
    return len(alike)


def compare(pair: str, arm: Arm, folder: Path) -> None:
    both, drafting, environment = arm
    with plain_server(pair, folder, *both, base=EXACT) as server:
        plain = list(rounds(server, pair))
    block = 32 if RANDOM_WIDTHS[0] in drafting else 16  # with copies, wider than the drafter's
    with dflash_server(pair, folder, *both, *drafting, base=EXACT, block=block, **environment) as server:
        info = worker_info(server)
        assert info["exact"] is True and "bit by bit" in server.log
        found = list(rounds(server, pair))
        assert_nothing_leaked(server)
        drafted = worker_info(server)["mean_accept_length"]
    assert drafted > 1.2, "nothing was drafted"
    print(f"{assert_exact(found, plain)} generations equal, accept length {drafted:.2f}")


def test_text_and_log_probabilities_are_plain_decodings(tmp_path: Path) -> None:
    compare("tiny-hybrid", EVERYTHING, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("pair", "arm"), ARMS)
def test_under_every_feature(pair: str, arm: Arm, tmp_path: Path) -> None:
    compare(pair, arm, tmp_path)
