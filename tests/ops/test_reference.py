"""The definitions of the operations against plain Python."""

from __future__ import annotations

import math
import struct
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.ops import Noise, accept_block, seeded_tokens, token_hash
from sglang_dflash.ops.reference import model, step
from sglang_dflash_cpu.layers.step_ops import match_copies, take_copies, walk_candidates


@given(before=st.integers(1, 300), gained=st.integers(1, 16), interval=st.sampled_from([1, 16, 64, 256]))
def test_accepted_tokens_are_counted_up_to_the_last_boundary(before: int, gained: int, interval: int) -> None:
    on_one = [position for position in range(gained) if (before + position + 1) % interval == 0]
    draft, target = torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64)
    target[0, gained - 1 :] = 1
    accepted = accept_block(draft, target, torch.tensor([before]), interval=interval)
    assert accepted.counts.tolist() == [[gained], [on_one[-1] + 1 if on_one else 0]]
    assert accepted.ends.tolist() == [[gained - 1], [on_one[-1] if on_one else -1]]


def murmur3_x86_32(data: bytes) -> int:
    """The algorithm on a multiple of 4 bytes, seed 0 (a published vector is checked below)."""
    mask, state = 0xFFFFFFFF, 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        state ^= word * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_token_hash_is_murmur3() -> None:
    assert murmur3_x86_32(b"test") == 0xBA6BD213
    seeds = torch.tensor([0, 42, -1, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 1, 77, 262_143, 5])
    actual = token_hash(seeds, positions, torch.tensor([0, 1, 151_935]))
    for i, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for j, token in enumerate((0, 1, 151_935)):
            assert actual[i, j] == murmur3_x86_32(struct.pack("<qII", seed, position, token))


def naive_copy(tokens: list[int], most: int, longest: int) -> tuple[int, list[int]]:
    """Length of the longest earlier occurrence of what ends ``tokens``, and the ``most`` tokens after it."""
    last = len(tokens) - 1
    best, after = 0, 0
    for end in range(last):
        length = 0
        while length < longest and length <= end and tokens[end - length] == tokens[last - length] >= 0:
            length += 1
        if length and length >= best:
            best, after = length, end + 1
    return best, [tokens[after + i % (last + 1 - after)] for i in range(most)] if best else []


MARGINS = (-math.inf, math.nan, 0.0, 0.5, 3.9, 4.0, 16.0, 99.0)


@given(st.integers(0, 2**32))
def test_copies_equal_those_of_a_naive_loop_after_rejected_tokens(seed: int) -> None:
    """Several requests go through steps; rejected and former requests' tokens stay in the table."""
    random, least, longest = Random(seed), 2, 5
    width, bs = random.randint(2, 6), random.randint(1, 3)

    def some(*shape: int) -> torch.Tensor:
        """Few tokens, so that they repeat; a negative one cannot be copied."""
        return torch.tensor(random.choices(range(-1, 4), k=math.prod(shape))).view(shape)

    history, found, rows = some(4, 60).int(), torch.zeros(4, 2, dtype=torch.int64), torch.randperm(4)[:bs]
    texts = [history[row, : random.randint(1, 20)].tolist() for row in rows]
    for _ in range(5):
        lens, block = torch.tensor([len(text) - 1 for text in texts]), some(bs, width)
        for text, new in zip(texts, block.tolist(), strict=True):
            text += new[: random.randint(1, width)]
        last = torch.tensor([len(text) - 1 for text in texts])
        defined, table, bound = found.clone(), history.clone(), int(last.max()) + 3
        step.match_copies(table, defined, rows, lens, block, last, longest=longest, bound=bound)
        match_copies(history, found, rows, lens, block, last, longest=longest, bound=bound)
        assert torch.equal(found, defined) and torch.equal(history, table)
        drafts, margins = some(bs, width).abs(), torch.tensor(random.choices(MARGINS, k=bs * (width - 1))).view(bs, -1)
        result, defined = drafts.clone(), found.clone()
        take_copies(result, margins, history, found, rows, last, least=least, margin=4.0)
        step.take_copies(as_defined := drafts.clone(), margins, history, defined, rows, last, least=least, margin=4.0)
        assert torch.equal(found, defined) and torch.equal(result, as_defined)
        for b, text in enumerate(texts):
            length, copy = naive_copy(text, width - 1, longest)
            assert found[rows[b], 0] >> 31 == (last[b] << 5) + length
            expected, first = drafts[b, 1:].tolist(), 0
            if length >= least:
                copy = [c if c >= 0 else d for c, d in zip(copy, expected, strict=True)]
                first = next((i for i, (c, d) in enumerate(zip(copy, expected, strict=True), 1) if c != d), 0)
            if first and margins[b, first - 1] >= 4:
                first = 0
            assert found[rows[b], 1] == first
            assert result[b].tolist() == [drafts[b, 0].item(), *(copy if first else expected)]


@pytest.mark.parametrize("pairs", [False, True])
def test_an_unsure_draft_is_the_token_that_the_target_would_draw(pairs: bool) -> None:
    """The candidates are the whole vocabulary here, and the target's logits their scores."""
    torch.manual_seed(3)
    bs, n, vocab = 40, 5, 12
    scores = torch.randn(bs, n, vocab) * torch.tensor([0.5, 1, 2, 4, 8])[:, None]
    noise = Noise(
        torch.randint(-(2**63), 2**63 - 1, (bs,)),
        torch.rand(bs) + 0.3,
        torch.randint(1, 9, (bs,), dtype=torch.int32),
        torch.rand(bs).where(torch.arange(bs) % 2 == 0, 1.0),
        0.3 * torch.rand(bs),
    )
    positions, order = torch.randint(9000, (bs,)), torch.rand(bs, n, vocab).argsort(2)
    books = (torch.zeros(bs, n, 4), torch.zeros(vocab, 4), torch.zeros(vocab, 4)) if pairs else None
    for walk in (model.walk_candidates, walk_candidates):
        tokens, _ = walk(order, scores.gather(2, order), positions % vocab, positions, noise, books)
        drawn_somewhere = 0
        for i in range(n):
            drawn = seeded_tokens(scores[:, i], noise.temperatures[:, None], noise[2:], noise.seeds, positions + i)
            sure = (torch.softmax(scores[:, i], 1).amax(1) >= model.UNSURE) | (noise.top_ks == 1)
            assert torch.equal(tokens[:, i], torch.where(sure, scores[:, i].argmax(1), drawn))
            drawn_somewhere += int((drawn[~sure] != scores[:, i].argmax(1)[~sure]).sum())
        assert drawn_somewhere > 20
