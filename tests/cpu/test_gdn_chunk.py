"""GDN prefill of the CPU platform against the recurrence in float64, and against transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_dflash_cpu.layers import gdn
from tests.support.gated_delta import delta_rule

SLOTS = 9


def inputs(
    lengths: list[int], H: int = 2, HV: int = 4, K: int = 8, V: int = 6, decay: float = 1.0, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return {
        "q": torch.randn(1, tokens, H, K, generator=generator),
        "k": torch.randn(1, tokens, H, K, generator=generator),
        "v": torch.randn(1, tokens, HV, V, generator=generator),
        "g": -decay * torch.rand(1, tokens, HV, generator=generator),
        "beta": torch.rand(1, tokens, HV, generator=generator),
        "initial_state": torch.randn(SLOTS, HV, V, K, generator=generator),
        "initial_state_indices": (1 + torch.randperm(SLOTS - 1, generator=generator)[: len(lengths)]).int(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


def expected(x: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    """Outputs ``[tokens, HV, V]``; and for every sequence the states before its first and after each token."""
    outputs, states = [], []
    starts = x["cu_seqlens"].tolist()
    for slot, start, end in zip(x["initial_state_indices"].tolist(), starts, starts[1:], strict=False):
        before = x["initial_state"][slot].to(dtype)
        if start == end:
            states.append(before[None])
            continue
        own = (x[name][0, start:end] for name in ("q", "k", "v", "g", "beta"))
        out, after = delta_rule(*own, before, dtype=dtype)
        outputs.append(out)
        states.append(torch.cat([before[None], after]))
    return torch.cat(outputs), states


def run(x: dict[str, Tensor], **options: bool) -> tuple[Tensor, Tensor]:
    out, nothing, starts = gdn.prefill(**x, head_first=False, use_qk_l2norm_in_kernel=True, **options)
    assert nothing is None
    return out, starts


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=5).filter(any),
    heads=st.sampled_from([(1, 1), (2, 4), (1, 3)]),
    decay=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_prefill_equals_the_recurrence(lengths: list[int], heads: tuple[int, int], decay: float, seed: int) -> None:
    x = inputs(lengths, *heads, decay=decay, seed=seed)
    outputs, states = expected(x)
    before = x["initial_state"].clone()
    out, starts = run(x)
    torch.testing.assert_close(out[0].double(), outputs, rtol=1e-4, atol=1e-5)
    every_64th = torch.cat([s[: len(s) - 1][::64] for s in states])
    torch.testing.assert_close(starts[0].double(), every_64th, rtol=1e-4, atol=1e-5)
    slots = x["initial_state_indices"].tolist()
    for slot, own in zip(slots, states, strict=True):
        torch.testing.assert_close(x["initial_state"][slot].double(), own[-1], rtol=1e-4, atol=1e-5)
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(x["initial_state"][others], before[others])


@pytest.mark.parametrize("lengths", [[64], [128, 64], [63, 64, 65], [1], [1, 1, 1], [200, 3, 70]])
def test_lengths_at_the_edges_of_chunks(lengths: list[int]) -> None:
    x = inputs(lengths)
    outputs, states = expected(x)
    out, starts = run(x)
    torch.testing.assert_close(out[0].double(), outputs, rtol=1e-4, atol=1e-5)
    assert starts.shape[1] == sum(-(-length // 64) for length in lengths)
    torch.testing.assert_close(starts[0, -1].double(), states[-1][(lengths[-1] - 1) // 64 * 64], rtol=1e-4, atol=1e-5)


def test_two_parts_of_a_prompt_leave_the_state_of_the_whole() -> None:
    """Chunked prefill: the second part starts from the state that the first left in the slot."""
    x = inputs([150])
    outputs, states = expected(x)
    names = ("q", "k", "v", "g", "beta")
    for part, length in ((slice(0, 70), 70), (slice(70, 150), 80)):
        piece = x | {name: x[name][:, part] for name in names} | {"cu_seqlens": torch.tensor([0, length])}
        out, _ = run(piece)
        torch.testing.assert_close(out[0].double(), outputs[part], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        x["initial_state"][x["initial_state_indices"][0]].double(), states[0][-1], rtol=1e-4, atol=1e-5
    )


def test_padding_reaches_no_real_slot() -> None:
    x = inputs([70, 5, 9])
    x["initial_state_indices"][1] = -1
    before = x["initial_state"].clone()
    outputs, _ = expected(x)
    out, _ = run(x)
    real = x["initial_state_indices"][[0, 2]].tolist()
    untouched = [slot for slot in range(1, SLOTS) if slot not in real]
    assert torch.equal(x["initial_state"][untouched], before[untouched])
    torch.testing.assert_close(out[0, 75:].double(), outputs[75:], rtol=1e-4, atol=1e-5)


def test_a_broken_sequence_does_not_reach_its_neighbours() -> None:
    x = inputs([70, 5, 9])
    outputs, _ = expected(x)
    x["v"][0, 70:75] = float("nan")
    out, _ = run(x)
    torch.testing.assert_close(out[0, :70].double(), outputs[:70], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[0, 75:].double(), outputs[75:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["little decay", "usual", "strong decay", "mixed decay", "one key, no decay"])
def test_prefill_is_as_accurate_as_the_recurrence_in_fp32(case: str) -> None:
    """The largest error against float64 is at most three times that of the recurrence in fp32."""
    decay = {"little decay": 1e-3, "strong decay": 50.0}.get(case, 1.0)
    x = inputs([192], H=16, HV=16, K=32, V=32, decay=decay)
    if case == "mixed decay":
        x["g"] *= 1e-2
        x["g"][:, 64] = -1000.0
    elif case == "one key, no decay":
        x["k"] = x["k"][:, :1].expand_as(x["k"])
        x["g"], x["beta"] = torch.zeros_like(x["g"]), torch.full_like(x["beta"], 0.999)
    exact, recurrence = expected(x), expected(x, torch.float32)
    out, _ = run(x)
    last = x["initial_state"][x["initial_state_indices"][0]]
    for ours, theirs, truth in (
        (out[0], recurrence[0], exact[0]),
        (last, recurrence[1][0][-1], exact[1][0][-1]),
    ):
        assert (ours - truth).abs().max() <= 3 * (theirs - truth).abs().max()


@pytest.mark.parametrize("form", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_prefill_equals_transformers(form: str) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x = inputs([150], H=4, HV=4)
    slot = x["initial_state_indices"][0]
    names = ("q", "k", "v", "g", "beta")
    theirs, state = getattr(modeling, form)(
        *(x[name] for name in names),
        initial_state=x["initial_state"][slot][None].transpose(-1, -2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out, _ = run(x)
    torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x["initial_state"][slot], state[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)
