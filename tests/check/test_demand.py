"""From flags to what the memory's division goes by."""

from __future__ import annotations

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.preflight import preflight
from sglang_dflash.memory.fit import Demand
from sglang_dflash.memory.machine import GPUS
from tests.support.cards import FOLDER

PAIR = {"target": str(FOLDER / "Qwen3.5-27B" / "target"), "drafter": str(FOLDER / "Qwen3.5-27B" / "drafter")}


def demand(*flags: str) -> Demand:
    memory = preflight(parse(flags, **PAIR)[0], GPUS["h200"]).memory
    assert memory is not None
    return memory.demand


def test_without_a_prefix_cache_there_is_a_state_for_each_request() -> None:
    alone = demand("--disable-radix-cache", "--max-running-requests", "9")
    assert (alone.slots_per_request, alone.max_states) == (1, 9)
    assert demand("--disable-radix-cache", "--max-mamba-cache-size", "20").max_states == 20
    assert demand("--max-running-requests", "9").max_states is None


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        (("--speculative-num-draft-tokens", "8"), 16),
        (("--speculative-num-draft-tokens", "8", "--linear-replayssm-cache-len", "32"), 32),
    ],
)
def test_a_ring_of_records_is_as_long_as_needed_or_asked_for(flags: tuple[str, ...], length: int) -> None:
    assert demand(*flags).records == length


def test_a_replay_keeps_float32_states_unless_a_flag_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
    by_environment, by_flag = demand(), demand("--mamba-ssm-dtype", "bfloat16")
    assert by_environment.replayed is not None and by_flag.replayed is not None
    assert by_environment.replayed.recurrent == 2 * by_environment.state.recurrent
    assert by_flag.replayed == by_flag.state == by_environment.state
