"""GDN prefill of the CPU platform against the recurrence, token by token, in float64."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from sglang_dflash_cpu.layers import gdn
from tests.support.gated_delta import delta_rule

SLOTS, K, V = 9, 8, 6
HEADS = st.sampled_from([(1, 1), (2, 4), (1, 3)])
DECAYS = st.sampled_from([1e-3, 1.0, 30.0])
Inputs = dict[str, Tensor]


def prompts(lengths: list[int], heads: tuple[int, int], decay: float, seed: int) -> Inputs:
    """Random inputs of a prefill of prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens, (H, HV) = sum(lengths), heads
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV,), "beta": (HV,)}
    x = {name: torch.randn(1, tokens, *shape, generator=generator) for name, shape in shapes.items()}
    return {
        **x,
        "g": -decay * x["g"].abs(),
        "beta": x["beta"].sigmoid(),
        "initial_state": torch.randn(SLOTS, HV, V, K, generator=generator),
        "initial_state_indices": (1 + torch.randperm(SLOTS - 1, generator=generator)[: len(lengths)]).int(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


PER_TOKEN = ("q", "k", "v", "g", "beta")


def expected(x: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Outputs ``[tokens, HV, V]``; and for every sequence the states before its first and after each token."""
    outputs, states = [], []
    starts = x["cu_seqlens"].tolist()
    for slot, start, end in zip(x["initial_state_indices"].tolist(), starts, starts[1:], strict=False):
        before = x["initial_state"][slot].double()
        out, after = before.new_empty(0, *x["v"].shape[2:]), before.new_empty(0, *before.shape)
        if end > start:
            out, after = delta_rule(*(x[name][0, start:end] for name in PER_TOKEN), before)
        outputs.append(out)
        states.append(torch.cat([before[None], after]))
    return torch.cat(outputs), states


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=5).filter(any), HEADS, DECAYS, st.integers(0, 99))
@example([63, 64, 65], (2, 4), 1.0, 0)
@example([128, 1], (2, 4), 1.0, 0)
def test_prefill_equals_the_recurrence(lengths: list[int], heads: tuple[int, int], decay: float, seed: int) -> None:
    x = prompts(lengths, heads, decay, seed)
    outputs, states = expected(x)
    before = x["initial_state"].clone()
    out, nothing, starts = gdn.prefill(**x, head_first=False, use_qk_l2norm_in_kernel=True)
    assert nothing is None
    assert_close(out[0].double(), outputs, rtol=1e-4, atol=1e-5)
    every_64th = torch.cat([s[: len(s) - 1][::64] for s in states])
    assert_close(starts[0].double(), every_64th, rtol=1e-4, atol=1e-5)
    slots = x["initial_state_indices"].tolist()
    for slot, own in zip(slots, states, strict=True):
        assert_close(x["initial_state"][slot].double(), own[-1], rtol=1e-4, atol=1e-5)
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(x["initial_state"][others], before[others])
