"""Step by step: drafts, accept lengths and recurrent states against the plain-PyTorch reference decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.reference_decoder import ReferenceDecoder
from tests.support.generation import flush, generate
from tests.support.prompts import corpus
from tests.support.servers import TRACKED, Server, recorded_blocks

pytestmark = pytest.mark.engine

PAIR, DRAFTER = "tiny-hybrid", "dflash2"
NEW_TOKENS = 80
STATE_TOLERANCE = 1e-5


def test_drafts_and_accept_lengths_equal_the_reference_step_by_step(recorded_hybrid: Server) -> None:
    reference = ReferenceDecoder.load(target_path(PAIR), drafter_path(PAIR, DRAFTER))
    accepted = 0
    for prompt in corpus(PAIR, 4, seed=1):
        flush(recorded_hybrid)
        answer = generate(recorded_hybrid, prompt, NEW_TOKENS)
        expected = reference.decode(prompt, NEW_TOKENS, width=16)
        assert answer.tokens == expected.tokens
        verified = recorded_blocks(recorded_hybrid.folder, answer.meta["id"])[: len(expected.steps)]
        assert [tuple(block[1:]) for _, block in verified] == [step.drafted for step in expected.steps]
        assert answer.meta["spec_verify_ct"] == len(expected.steps)
        accepted += sum(expected.accept_lengths) - len(expected.steps)
    assert accepted > 0, "no draft was ever accepted: the comparison says nothing"


def test_committed_recurrent_state_equals_a_fresh_prefill(recorded_hybrid: Server) -> None:
    """Also where a block crossed a track boundary (every 64 tokens here), and for the snapshot's own sake after it."""
    (prompt,) = corpus(PAIR, 1, seed=2)
    flush(recorded_hybrid)
    answer = generate(recorded_hybrid, prompt, NEW_TOKENS, sampling_params={"ignore_eos": True})
    text = [*prompt, *answer.tokens]
    committed = {
        int(path.stem.rsplit("-", 1)[1]): path
        for path in recorded_hybrid.folder.glob(f"state-{answer.meta['id']}-*.pt")
    }
    lengths = sorted(length for length in committed if length <= len(text))
    assert len(lengths) > 3
    interval = int(TRACKED[-1])
    assert lengths[0] // interval != lengths[-1] // interval, "no track boundary was crossed"
    for length in lengths[1:]:
        flush(recorded_hybrid)
        fresh = generate(recorded_hybrid, text[:length], 1)
        assert_equal_states(committed[length], recorded_hybrid.folder / f"state-{fresh.meta['id']}-{length}.pt")


def assert_equal_states(found: Path, expected: Path) -> None:
    one, other = torch.load(found), torch.load(expected)
    for mine, wanted in zip([one["temporal"], *one["conv"]], [other["temporal"], *other["conv"]], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=STATE_TOLERANCE, atol=STATE_TOLERANCE)


def test_a_turn_after_an_end_inside_a_block_starts_from_the_right_state(recorded_hybrid: Server) -> None:
    """The block that ends the answer crosses the next track boundary, after another block crossed the one before.

    The state shows it: this target's tokens are often right from a wrong state too.
    """
    interval = int(TRACKED[-1])
    for before, prompt in enumerate(corpus(PAIR, 4, seed=4), 1):
        flush(recorded_hybrid)
        end = 2 * interval - len(prompt) % interval - 3 * before
        first = generate(recorded_hybrid, prompt, end, sampling_params={"ignore_eos": True})
        following = [*prompt, *first.tokens, 7, 9, 11]
        hit = generate(recorded_hybrid, following, 1)
        assert hit.meta["cached_tokens"] == len(following[:-3]) // interval * interval > len(prompt) - interval
        flush(recorded_hybrid)
        fresh = generate(recorded_hybrid, following, 1)
        assert fresh.meta["cached_tokens"] == 0
        assert_equal_states(
            *(recorded_hybrid.folder / f"state-{each.meta['id']}-{len(following)}.pt" for each in (hit, fresh))
        )
