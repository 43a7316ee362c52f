"""On two CUDA devices: DP attention with an idle rank, and at adaptive widths, in bfloat16.

Texts equal plain decoding's up to a near-tie. A collective operation whose ranks differ ends after a minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.generation import Answer, assert_diverging_only_at_near_ties, assert_nothing_leaked, generate_all
from tests.support.prompts import corpus
from tests.support.servers import BFLOAT16, Server, dflash_server, plain_server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices that this torch can use"),
]

PAIR = "tiny-moe"
FLAGS = (
    *("--tp-size", "2", "--attn-dp-size", "2", "--enable-dp-lm-head", "--dist-timeout", "60"),
    *("--decode-log-interval", "1"),
)


def ask(server: Server, concurrency: int, rank: Callable[[int], int | None]) -> list[Answer]:
    inputs, top = corpus(PAIR, 8, seed=21), {"return_logprob": True, "top_logprobs_num": 2}
    return generate_all(server, inputs, concurrency, 48, lambda i: {"routed_dp_rank": rank(i)}, **top)


@pytest.mark.parametrize(
    ("widths", "concurrency"), [((), 1), (("--speculative-adaptive",), 8)], ids=["idle", "adaptive"]
)
def test_texts_are_plain_decodings_and_every_step_replays_graphs(
    widths: tuple[str, ...], concurrency: int, tmp_path: Path
) -> None:
    """One request after the other leaves one of the ranks idle."""
    with plain_server(PAIR, tmp_path, base=BFLOAT16) as server:
        expected = ask(server, concurrency, lambda i: None)
    with dflash_server(PAIR, tmp_path, *FLAGS, *widths, base=BFLOAT16) as server:
        answers = ask(server, concurrency, lambda i: i % 2)
        assert_nothing_leaked(server)
        steps = re.findall(r"cuda graph: (\w+)", server.log)
    assert_diverging_only_at_near_ties(answers, expected)
    assert steps and set(steps) == {"True"}, "a step ran without graphs"
