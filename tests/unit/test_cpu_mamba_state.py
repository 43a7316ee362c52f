"""Tracking and committing recurrent states, against copies made slot by slot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gdn_reference import no_host_sync

from sglang_dflash.cpu import mamba_state
from sglang_dflash.cpu.gdn_record import Records

LAYERS, SLOTS, BLOCK, DIM, WIDTH = 3, 12, 5, 10, 4


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    conv = torch.randn(LAYERS, SLOTS, DIM, WIDTH - 1, generator=generator)
    return conv, torch.randn(LAYERS, SLOTS, 2, 3, 5, generator=generator)


def caches(bs: int) -> SimpleNamespace:
    """The tensors of SGLang's speculative state pool for ``bs`` requests and a padding row."""
    conv, ssm = pools()
    columns = torch.randn(LAYERS, bs + 1, DIM, BLOCK + WIDTH - 2)
    windows = columns.unfold(-1, WIDTH - 1, 1).transpose(2, 3)  # steps share memory, as for any chain
    intermediate = torch.randn(LAYERS, bs + 1, BLOCK, *ssm.shape[2:])  # read as writes, keys and decays
    return SimpleNamespace(conv=[conv], temporal=ssm, intermediate_ssm=intermediate, intermediate_conv_window=[windows])


@pytest.mark.parametrize("mask", [[True, False, True, True], [False] * 4])
def test_track_copies_the_masked_requests_in_all_layers(mask: list[bool]) -> None:
    conv, ssm = pools()
    source, target = torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.tensor([5, 6, 7, 8])
    expected = [pool.clone() for pool in (conv, ssm)]
    for pool in expected:
        for i, wanted in enumerate(mask):
            if wanted:
                pool[:, target[i]] = pool[:, source[i]]
    mamba_state.track(conv, ssm, source, torch.tensor(mask), target, 4)
    assert torch.equal(conv, expected[0]) and torch.equal(ssm, expected[1])


def test_track_ignores_rows_past_the_batch_and_freed_slots() -> None:
    conv, ssm = pools()
    before = conv.clone(), ssm.clone()
    source, target = torch.tensor([-1, 2, 3]), torch.tensor([5, -1, 7])
    mamba_state.track(conv, ssm, source[1:], torch.tensor([True, True]), target[1:], 1, check_freed_slots=True)
    assert torch.equal(conv[:, 1:], before[0][:, 1:]) and torch.equal(ssm[:, 1:], before[1][:, 1:])


@pytest.mark.parametrize("tracking", [False, True])
@pytest.mark.parametrize("rows", [None, [2, 0, 3, 1]])
def test_commit_takes_the_state_of_the_last_accepted_token(tracking: bool, rows: list[int] | None) -> None:
    cache = caches(bs=4)
    slots, last = torch.tensor([3, 5, 7, 9], dtype=torch.int32), torch.tensor([0, 4, -1, 2])
    track_slots, track_steps = torch.tensor([4, 6, 8, 10]), torch.tensor([-1, 1, -1, 2])
    source = rows or [0, 1, 2, 3]
    ssm, conv, windows = cache.temporal.clone(), cache.conv[0].clone(), cache.intermediate_conv_window[0]
    wanted = [(slots, last), (track_slots, track_steps)] if tracking else [(slots, last)]
    for i, row in enumerate(source):
        before = cache.temporal[:, slots[i : i + 1].long()]
        for to, positions in wanted:
            if positions[i] >= 0:
                records = Records(cache.intermediate_ssm, torch.tensor([row]), before)
                ssm[:, to[i]] = records.state_after(positions[i : i + 1])[:, 0]
                conv[:, to[i]] = windows[:, row, positions[i]]
    with no_host_sync():
        mamba_state.commit(
            cache,
            slots,
            last,
            track_slots if tracking else None,
            track_steps if tracking else None,
            src_indices_raw=None if rows is None else torch.tensor(rows),
        )
    # Slot 0 is the one that nobody reads: it receives what is not wanted.
    torch.testing.assert_close(cache.temporal[:, 1:], ssm[:, 1:])
    assert torch.equal(cache.conv[0][:, 1:], conv[:, 1:])


def test_commit_leaves_real_slots_alone_for_padding() -> None:
    cache = caches(bs=2)
    before = cache.temporal.clone(), cache.conv[0].clone()
    mamba_state.commit(cache, torch.tensor([-1, 0]), torch.tensor([2, 1]), None, None)
    assert torch.equal(cache.temporal[:, 1:], before[0][:, 1:])
    assert torch.equal(cache.conv[0][:, 1:], before[1][:, 1:])
