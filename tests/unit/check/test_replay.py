"""Which way to keep states a server will take, from its flags."""

from __future__ import annotations

import pytest

from sglang_dflash.check.options import parse
from sglang_dflash.check.replay import is_replayed
from sglang_dflash.memory.fit import Demand
from sglang_dflash.memory.machine import CPU, UNKNOWN_GPU
from sglang_dflash.memory.sizes import StateBytes

SWITCH = "SGLANG_DFLASH_STATE_REPLAY"
FLAG = "--enable-linear-replayssm-spec"
DENSE, HYBRID = StateBytes(0, 0, 0), StateBytes(recurrent=90, conv=10, conv_column=5, record=2)
SCARCE, PLENTY = 11_200, 100_000


def demand(state: StateBytes = HYBRID) -> Demand:
    return Demand(
        target_weights=1000,
        drafter_weights=200,
        target_kv=8,
        draft_kv=2,
        state=state,
        block=4,
        slots_per_request=5,
        state_share=1.0,
        max_running=8,
    )


@pytest.mark.parametrize(
    ("flags", "switch", "static", "expected"),
    [
        ([], None, SCARCE, True),
        ([], None, PLENTY, False),
        ([], None, 0, False),  # unknown
        ([FLAG], None, PLENTY, True),
        ([], "1", PLENTY, True),
        ([], "0", SCARCE, False),
        (["--linear-attn-backend", "cutedsl"], None, SCARCE, False),
        (["--linear-attn-backend", "cutedsl", "--linear-attn-decode-backend", "flashinfer"], None, SCARCE, True),
        (["--enable-linear-replayssm"], None, SCARCE, False),
    ],
)
def test_a_gpu(
    flags: list[str], switch: str | None, static: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    args = parse(flags, target="t", drafter="d")[0]
    assert is_replayed(args, UNKNOWN_GPU, demand(), static) == expected


def test_the_cpu_platform_replays_whatever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    args = parse([], target="t", drafter="d")[0]
    assert is_replayed(args, CPU, demand(), PLENTY)
    assert not is_replayed(args, CPU, demand(DENSE), PLENTY)
    monkeypatch.setenv(SWITCH, "0")
    assert not is_replayed(args, CPU, demand(), PLENTY)
