"""In the published dtype, bfloat16: plain decoding's tokens up to a near-tie, by the judge of the tests on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.generation import generate_all
from tests.support.near_tie import assert_diverging_only_at_near_ties
from tests.support.pair_servers import BFLOAT16, dflash_server, plain_server
from tests.support.prompts import corpus


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["tiny-dense", "tiny-hybrid"])
def test_tokens_equal_plain_decoding(pair: str, tmp_path: Path) -> None:
    inputs = corpus(pair, 32)
    with plain_server(pair, tmp_path, base=BFLOAT16) as server:
        plain = generate_all(server, inputs, 8, 128, return_logprob=True, top_logprobs_num=2)
    with dflash_server(pair, tmp_path, base=BFLOAT16) as server:
        assert_diverging_only_at_near_ties(generate_all(server, inputs, 8, 128), plain)
