"""The division of memory that a server computes from free bytes, on the published pairs' sizes and GPUs."""

from __future__ import annotations

import pytest

from sglang_dflash.check.machine import GPUS
from sglang_dflash.check.pools import Sizing
from sglang_dflash.hooks.flags import modernise_argv
from sglang_dflash.plan.division import STATE_SHARE, TOKENS_PER_REQUEST, state_slots
from tests.support.cards import NAMES, card
from tests.support.configs import card_pair, memory_of

# (GPU, pair) -> requests and K/V tokens of the launch that predicted --mamba-full-memory-ratio in tenths (0956e6a).
IN_TENTHS = {
    ("h100", "Qwen3.5-27B"): (1, 32_339),
    ("h200", "Qwen3.5-27B"): (34, 300_463),
    ("h200", "Qwen3.6-35B-A3B"): (48, 592_177),
    ("b200", "Qwen3.5-27B"): (48, 522_752),
    ("b200", "Qwen3.6-35B-A3B"): (48, 1_036_672),
}


def of_card(gpu: str, name: str) -> tuple[Sizing, int, int, int]:
    """Sizes, static memory, requests and tokens with the card's flags."""
    backend = "trtllm_mha" if gpu == "b200" else "fa3"
    backends = ("--attention-backend", backend, "--speculative-draft-attention-backend", backend)
    memory = memory_of(name, *modernise_argv(card(name).arguments_for(**card_pair(name)))[0], *backends, on=GPUS[gpu])
    return memory.served.sizing, memory.static_bytes, memory.served.running, memory.served.tokens


@pytest.mark.parametrize(("gpu", "name"), IN_TENTHS)
def test_as_many_requests_run_as_with_a_ratio_in_tenths(gpu: str, name: str) -> None:
    _, _, running, tokens = of_card(gpu, name)
    before, tokens_before = IN_TENTHS[gpu, name]
    assert before <= running <= before + 1
    assert tokens == tokens_before or tokens >= running * TOKENS_PER_REQUEST


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gpu", GPUS)
def test_no_more_slots_leave_kv_and_no_fewer_are_sglangs(gpu: str, name: str) -> None:
    sizing, static, _, _ = of_card(gpu, name)
    state, rows = sizing.replayed, sizing.max_running + 1
    free, records = static - sizing.weights - rows * (state.scratch - state.records), rows * state.records
    own = int((max(0, free) * STATE_SHARE / (1 + STATE_SHARE) - records - state.slot) // state.slot)

    def slots(requests: int) -> int:
        return state_slots(
            free,
            ratio=STATE_SHARE,
            records=records,
            slot=state.slot,
            per_request=sizing.slots_per_request,
            requests=requests,
            token=sizing.per_token,
            context=sizing.context,
        )

    def tokens(slots: int) -> float:
        return (free - records - (slots + 1) * state.slot) / sizing.per_token

    chosen = slots(sizing.max_running)
    assert chosen >= max(0, own)
    if chosen > max(0, own):
        running = chosen // sizing.slots_per_request
        assert tokens(chosen) >= max(sizing.context, running * TOKENS_PER_REQUEST)
        wider = chosen + sizing.slots_per_request
        least = max(sizing.context, (running + 1) * TOKENS_PER_REQUEST)
        assert running == sizing.max_running or tokens(wider) < least
