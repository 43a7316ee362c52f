"""Recurrent states of a running request, by the flags that decide it."""

from __future__ import annotations

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.memory.sizes import in_transfer, slots_per_request


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        ("", 5),
        ("--mamba-radix-cache-strategy extra_buffer", 5),
        ("--mamba-radix-cache-strategy extra_buffer_lazy", 4),
        ("--disable-overlap-schedule", 4),
        ("--mamba-radix-cache-strategy no_buffer", 3),
        ("--mamba-radix-cache-strategy extra_buffer --disable-radix-cache", 1),
        ("--disaggregation-mode decode", 1),
        ("--disaggregation-mode prefill", 5),
    ],
)
def test_slots_of_a_running_request(flags: str, slots: int) -> None:
    assert slots_per_request(parse(flags.split(), target="t", drafter="d")[0]) == slots


@pytest.mark.parametrize(
    ("flags", "waiting"),
    [
        ("", None),
        ("--disaggregation-mode prefill", 0),
        ("--disaggregation-mode decode", 0),
        ("--disaggregation-mode decode --max-running-requests 33", 0),
        ("--disaggregation-mode decode --max-running-requests 32", 64),
        ("--disaggregation-mode decode --max-running-requests 32 --disaggregation-decode-extra-slots 5", 5),
    ],
)
def test_requests_in_transfer(flags: str, waiting: int | None) -> None:
    assert in_transfer(parse(flags.split(), target="t", drafter="d")[0]) == waiting
