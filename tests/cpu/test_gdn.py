"""GDN prefill of the CPU platform against the recurrence, token by token, in float64."""

from __future__ import annotations

import pytest
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


@pytest.mark.parametrize("option", ["disable_state_update", "use_qk_l2norm_in_kernel", "is_kda", "cache_ring"])
def test_a_verify_of_other_models_is_refused(option: str) -> None:
    """A chain's verify is the definition that ``tests/states`` has."""
    nothing = torch.empty(0)
    own = {"use_qk_l2norm_in_kernel": True, "disable_state_update": True, "intermediate_states_buffer": nothing}
    changed = {**own, option: option in ("is_kda", "cache_ring")}
    with pytest.raises(NotImplementedError, match="verify of GDN"):
        gdn.verify(nothing, nothing, nothing, 1.0, 20.0, *[nothing] * 6, **changed)


def prompts(
    lengths: list[int],
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (K, V),
    decay: float = 1.0,
    seed: int = 0,
) -> Inputs:
    """Random inputs of a prefill of prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens, (H, HV), (K, V) = sum(lengths), heads, sizes
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


def expected(x: Inputs, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    """Outputs ``[tokens, HV, V]``; and for every sequence the states before its first and after each token."""
    outputs, states = [], []
    starts = x["cu_seqlens"].tolist()
    for slot, start, end in zip(x["initial_state_indices"].tolist(), starts, starts[1:], strict=False):
        before = x["initial_state"][slot].to(dtype)
        out, after = before.new_empty(0, *x["v"].shape[2:]), before.new_empty(0, *before.shape)
        if end > start:
            out, after = delta_rule(*(x[name][0, start:end] for name in PER_TOKEN), before, dtype=dtype)
        outputs.append(out)
        states.append(torch.cat([before[None], after]))
    return torch.cat(outputs), states


def prefill(x: Inputs) -> tuple[Tensor, Tensor]:
    out, nothing, starts = gdn.prefill(**x, head_first=False, use_qk_l2norm_in_kernel=True)
    assert nothing is None
    return out, starts


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=5).filter(any), HEADS, DECAYS, st.integers(0, 99))
@example([63, 64, 65], (2, 4), 1.0, 0)
@example([128, 1], (2, 4), 1.0, 0)
def test_prefill_equals_the_recurrence(lengths: list[int], heads: tuple[int, int], decay: float, seed: int) -> None:
    x = prompts(lengths, heads, decay=decay, seed=seed)
    outputs, states = expected(x)
    before = x["initial_state"].clone()
    out, starts = prefill(x)
    assert_close(out[0].double(), outputs, rtol=1e-4, atol=1e-5)
    every_64th = torch.cat([s[: len(s) - 1][::64] for s in states])
    assert_close(starts[0].double(), every_64th, rtol=1e-4, atol=1e-5)
    slots = x["initial_state_indices"].tolist()
    for slot, own in zip(slots, states, strict=True):
        assert_close(x["initial_state"][slot].double(), own[-1], rtol=1e-4, atol=1e-5)
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(x["initial_state"][others], before[others])


@pytest.mark.parametrize("fault", ["padding", "NaN"])
def test_a_padded_or_broken_sequence_does_not_reach_its_neighbours(fault: str) -> None:
    x = prompts([70, 5, 9])
    before, (outputs, _) = x["initial_state"].clone(), expected(x)
    if fault == "padding":
        x["initial_state_indices"][1] = -1
    else:
        x["v"][0, 70:75] = float("nan")
    out, _ = prefill(x)
    assert_close(out[0, :70].double(), outputs[:70], rtol=1e-4, atol=1e-5)
    assert_close(out[0, 75:].double(), outputs[75:], rtol=1e-4, atol=1e-5)
    untouched = sorted(set(range(1, SLOTS)) - set(x["initial_state_indices"].tolist()))
    assert torch.equal(x["initial_state"][untouched], before[untouched])


@pytest.mark.parametrize("case", ["little decay", "usual", "strong decay", "mixed decay", "one key, no decay"])
def test_prefill_is_as_accurate_as_the_recurrence_in_fp32(case: str) -> None:
    """The largest error against float64 is at most three times that of the recurrence in fp32."""
    x = prompts([192], (16, 16), (32, 32), decay={"little decay": 1e-3, "strong decay": 50.0}.get(case, 1.0))
    if case == "mixed decay":
        x["g"] *= 1e-2
        x["g"][:, 64] = -1000.0
    elif case == "one key, no decay":
        x["k"] = x["k"][:, :1].expand_as(x["k"])
        x["g"], x["beta"] = torch.zeros_like(x["g"]), torch.full_like(x["beta"], 0.999)
    exact, recurrence = expected(x), expected(x, torch.float32)
    out, _ = prefill(x)
    last = x["initial_state"][x["initial_state_indices"][0]]
    states = (last, recurrence[1][0][-1], exact[1][0][-1])
    for ours, theirs, truth in ((out[0], recurrence[0], exact[0]), states):
        assert (ours - truth).abs().max() <= 3 * (theirs - truth).abs().max()
