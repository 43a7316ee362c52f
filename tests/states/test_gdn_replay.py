"""The replay of a gated delta net: its definition against the recurrence in float64, token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_dflash.states.reference import gdn_commit, gdn_verify
from tests.support.gdn_replay import RING, Blocks, alike

# Of a result's largest value. Records in 16 bits have a low part, so only what is stored in 16 bits is coarse.
FP32, HALVES, BF16 = 5e-6, 5e-5, 2**-7


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected).abs().max().item()
    assert error <= tolerance * max(1e-3, expected.abs().max().item()), error


def check(blocks: Blocks, counts: Tensor, track_counts: Tensor) -> None:
    """Outputs of a verify, which leaves the states and other records, then the states after a commit."""
    pool = blocks.states.clone()
    expected = [[blocks.expected(layer, i) for i in range(blocks.bs)] for layer in range(blocks.layers)]
    outputs = blocks.verify(gdn_verify, blocks.records)
    assert torch.equal(blocks.states, pool)
    for part in blocks.records.parts:
        own = torch.zeros_like(part, dtype=torch.bool)
        own[:, blocks.rows[blocks.slots >= 0], :, : blocks.width] = True
        assert torch.equal(part[:, 1:].isnan(), ~own[:, 1:])  # padding writes to row 0
    gdn_commit(blocks.states, blocks.records, blocks.rows, blocks.slots, counts, blocks.track_slots, track_counts)
    half = blocks.dtype != torch.float32
    of_states = BF16 if blocks.state_dtype != torch.float32 else HALVES if half else FP32
    assert outputs.dtype == blocks.dtype
    for layer in range(blocks.layers):
        for i in range(blocks.bs):
            own = outputs[layer].unflatten(0, (blocks.bs, -1))[i]
            if not blocks.live[i]:
                assert own.count_nonzero() == 0
                continue
            out, states = expected[layer][i]
            assert_near(own, out, BF16 if half else FP32)
            for slot, count in ((blocks.slots[i], counts[i]), (blocks.track_slots[i], track_counts[i])):
                after = blocks.states[layer, slot]
                if count > 0:
                    assert_near(after, states[count], of_states)
                    pool[layer, slot] = after
    # Nothing else has changed, but what belongs to nobody.
    assert torch.equal(blocks.states[:, 1:], pool[:, 1:])


@settings(max_examples=60, deadline=None)
@given(
    bs=st.integers(1, 2),
    width=st.integers(1, RING),
    group=st.integers(1, 3),
    halves=st.booleans(),
    half_states=st.booleans(),
    decay=st.sampled_from([0.01, 1.0, 30.0]),
    padded=st.booleans(),
    data=st.data(),
)
def test_a_block_and_its_commit_equal_the_recurrence(
    bs: int, width: int, group: int, halves: bool, half_states: bool, decay: float, padded: bool, data: st.DataObject
) -> None:
    blocks = Blocks(
        bs, width, HV=2 * group, decay=decay, padded=padded, seed=data.draw(st.integers(0, 99)),
        dtype=torch.bfloat16 if halves else torch.float32, state_dtype=torch.bfloat16 if half_states else torch.float32,
        round_beta=half_states,
    )  # fmt: skip
    counts = st.lists(st.integers(-1, width), min_size=blocks.bs, max_size=blocks.bs).map(torch.tensor)
    check(blocks, data.draw(counts), data.draw(counts))


def test_a_strong_decay_and_equal_keys_cost_no_precision() -> None:
    decaying = Blocks(2, RING)
    decaying.make_first_decay_strong()
    for blocks in (decaying, alike(2)):
        check(blocks, torch.tensor([RING, 9]), torch.tensor([1, 2]))
