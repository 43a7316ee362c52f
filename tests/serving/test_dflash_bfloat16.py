"""In the published dtype, bfloat16: plain decoding's tokens up to a near-tie, by the judge of the tests on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash_lab.pairs import NAMES
from tests.support.generation import BF16_GAP, Answer, assert_diverging_only_at_near_ties, generate_all, largest_change
from tests.support.pair_servers import BFLOAT16, dflash_server, plain_server
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import Server

pytestmark = pytest.mark.engine


def answers(server: Server, pair: str) -> list[Answer]:
    """After text that it was trained on a target is sure; after random tokens it is often nearly undecided."""
    inputs = [*corpus(pair, 24), *random_prompts(pair, 16)]
    return generate_all(server, inputs, 8, 128, return_logprob=True, top_logprobs_num=4)


@pytest.mark.slow
@pytest.mark.parametrize("pair", NAMES)
def test_tokens_equal_plain_decoding(pair: str, tmp_path: Path) -> None:
    with plain_server(pair, tmp_path, base=BFLOAT16) as server:
        plain = answers(server, pair)
    with dflash_server(pair, tmp_path, base=BFLOAT16) as server:
        ours = answers(server, pair)
    assert_diverging_only_at_near_ties(ours, plain)
    assert largest_change(ours, plain) < BF16_GAP
