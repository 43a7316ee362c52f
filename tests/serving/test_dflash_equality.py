"""Greedy DFLASH yields plain decoding's tokens under every schedule, in bfloat16 up to near-ties.

And in the stored number of steps (``tests/support/acceptance.py``): a drafter that reads wrong changes no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash_lab.pairs import NAMES, target_path
from sglang_dflash_lab.train.hf import load_model
from tests.serving.matrix import CHUNKED, MATRIX, MIXED, NO_CACHE, ONE, PAGED, SYNC, Cell, finished
from tests.support import acceptance
from tests.support.checkpoints import assert_greedy
from tests.support.generation import assert_diverging_only_at_near_ties, assert_nothing_leaked, flush, generate_all
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import BFLOAT16, Server, dflash_server, plain_server

pytestmark = pytest.mark.engine

NEW_TOKENS = acceptance.NEW_TOKENS


def greedy_tokens(server: Server, pair: str, number: int = 16) -> list[list[int]]:
    return [answer.tokens for answer in generate_all(server, corpus(pair, number), 8, NEW_TOKENS)]


def compare(cell: Cell, server: Server, expected: Sequence[Sequence[int]]) -> int:
    """Together, alone, and from the prefix cache; the number of generations compared."""
    inputs = corpus(cell.pair, len(expected))
    compared = 0
    for concurrency, number in ((8, len(expected)), (1, len(expected) // 2)):
        flush(server)
        answers = generate_all(server, inputs[:number], concurrency, NEW_TOKENS)
        answers += generate_all(server, inputs[:2], concurrency, NEW_TOKENS)
        for answer, tokens in zip(answers, [*expected[:number], *expected[:2]], strict=True):
            assert answer.tokens == tokens
        if cell.drafts_every_step(concurrency):
            acceptance.assert_as_stored(answers[:number], cell.pair, cell.drafter, cell.block)
        # Together, requests share the chunks' budget, and a chunk may end where no recurrent state is kept.
        # A server for one request keeps few states.
        if concurrency == 1 and not {"no_buffer", NO_CACHE, *ONE} & {*cell.arguments}:
            cached = [answer.meta["cached_tokens"] for answer in answers[-2:]]
            assert max(cached) > 0, "the repeated prompts were not read from the prefix cache"
        compared += len(answers)
    assert_nothing_leaked(server)
    return compared


def test_equal_tokens_with_overlap(plain_hybrid: Server, dflash_hybrid: Server) -> None:
    assert compare(Cell("tiny-hybrid"), dflash_hybrid, greedy_tokens(plain_hybrid, "tiny-hybrid")) == 28


def test_equal_tokens_of_a_dflash2_drafter_in_mixed_batches(plain_hybrid: Server, recorded_hybrid: Server) -> None:
    cell = Cell("tiny-hybrid", "dflash2", arguments=(MIXED,))
    assert compare(cell, recorded_hybrid, greedy_tokens(plain_hybrid, cell.pair, 8)) == 16


def test_equal_tokens_without_overlap_in_pages_and_chunks_on_two_ranks(tmp_path: Path) -> None:
    """Here to the target in transformers; the matrix compares with plain decoding in SGLang."""
    cell = Cell("tiny-moe", block=4, arguments=(*SYNC, *PAGED, *CHUNKED, "--tp-size", "2"))
    target = load_model(target_path(cell.pair))
    with dflash_server(cell.pair, tmp_path, *cell.arguments, block=cell.block) as server:
        expected = greedy_tokens(server, cell.pair, 8)
        for prompt, tokens in zip(corpus(cell.pair, 8), expected, strict=True):
            assert_greedy(target, prompt, tokens)
        assert compare(cell, server, expected) == 16


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_equal_tokens_everywhere(cell: Cell, tmp_path: Path) -> None:
    record = finished()
    if str(cell) in record.results():
        pytest.skip("passed before with this very package (tests/serving/matrix.py)")
    if cell.pair not in record.results():
        with plain_server(cell.pair, tmp_path) as server:
            record.add(cell.pair, greedy_tokens(server, cell.pair))
    drafts: dict[str, Any] = {"drafter": cell.drafter, "block": cell.block}
    with dflash_server(cell.pair, tmp_path, *cell.arguments, **drafts, **dict(cell.environment)) as server:
        record.add(str(cell), compare(cell, server, record.results()[cell.pair]))


@pytest.mark.slow
@pytest.mark.parametrize("pair", NAMES)
def test_tokens_in_bfloat16_equal_plain_decodings_up_to_near_ties(pair: str, tmp_path: Path) -> None:
    """After text that it was trained on a target is sure; after random tokens it is often nearly undecided."""
    inputs = [*corpus(pair, 24), *random_prompts(pair, 16)]
    top = {"return_logprob": True, "top_logprobs_num": 8}  # up to six tokens lie within two steps of a logit
    with plain_server(pair, tmp_path, base=BFLOAT16) as server:
        plain = generate_all(server, inputs, 8, 128, **top)
    with dflash_server(pair, tmp_path, base=BFLOAT16) as server:
        ours = generate_all(server, inputs, 8, 128, **top)
    assert_diverging_only_at_near_ties(ours, plain)
