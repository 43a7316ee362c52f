"""Drafts that are no numbers are counted, and told once."""

from __future__ import annotations

import logging

import pytest
import torch

from sglang_dflash.worker.observe.broken_drafts import READ_EVERY, BrokenDrafts


@pytest.mark.parametrize("speaks", [True, False])
def test_the_first_is_told_and_all_are_counted(speaks: bool, caplog: pytest.LogCaptureFixture) -> None:
    broken = BrokenDrafts("cpu", speaks)
    for _ in range(READ_EVERY):
        broken.add(torch.tensor(0))
    assert broken.collect() == 0 and not caplog.records
    for _ in range(2 * READ_EVERY):
        broken.add(torch.tensor(3))
        broken.collect()
    assert broken.collect() == 6 * READ_EVERY
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * speaks
