"""Every Triton kernel against its torch definition, on random inputs.

Not collected by itself: tests/ops/test_triton.py runs it under Triton's interpreter
(``TRITON_INTERPRET=1``), tests/gpu runs it on a real device (``OPS_DEVICE=cuda``).
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from sglang_dflash.ops import reference

MODULES = ("block", "copies", "norm_rope", "sampling")
DEVICE = os.environ.get("OPS_DEVICE", "cpu")


def kernel(name: str):
    modules = (importlib.import_module(f"sglang_dflash.ops.kernels.{module}") for module in MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("bs, width", [(0, 4), (1, 1), (3, 2), (5, 7), (2, 16), (4, 33)])
@pytest.mark.parametrize("lens_dtype", [torch.int32, torch.int64])
def test_prepare_block(bs: int, width: int, lens_dtype: torch.dtype) -> None:
    table = ints(1, 10_000, 9, 64, dtype=torch.int32)
    args = (ints(0, 500, bs), ints(0, 63, bs, dtype=lens_dtype), ints(0, 9, bs, dtype=lens_dtype), table)
    expected = reference.prepare_block(*args, width=width, mask_token_id=511)
    actual = kernel("prepare_block")(*args, width=width, mask_token_id=511)
    for name in expected._fields:
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=0)


@pytest.mark.parametrize("bs, width", [(0, 4), (6, 1), (50, 2), (50, 7), (50, 16), (8, 33)])
def test_accept_block(bs: int, width: int) -> None:
    # Two tokens only, so that every accept length occurs; a row stride that is not the width, as in a graph's
    # buffer.
    draft = ints(0, 2, bs, width + 3)[:, :width]
    target = ints(0, 2, bs, width)
    if bs:
        target[0, :-1] = draft[0, 1:]
    lens = ints(1, 9_000, bs)
    expected, actual = (
        reference.accept_block(draft, target, lens),
        kernel("accept_block")(draft, target, lens),
    )
    for name in expected._fields:
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=0)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    "layers, tokens, heads, head_dim, rotary_dim", [(2, 0, 2, 8, 8), (3, 5, 2, 64, 64), (1, 4, 6, 96, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_per_head", [True, False])
def test_norm_rope(
    layers: int, tokens: int, heads: int, head_dim: int, rotary_dim: int, neox: bool, dtype: torch.dtype,
    weight_per_head: bool,
) -> None:  # fmt: skip
    # Queries, keys and values come out of one projection, so what is normalised is a strided part of it.
    projected = torch.randn(layers, tokens, 2, heads, head_dim, device=DEVICE).to(dtype)
    norm_weight = torch.rand(layers, heads if weight_per_head else 1, head_dim, device=DEVICE).to(dtype)
    args = (
        projected[:, :, 0],
        norm_weight.expand(-1, heads, -1),
        1e-6,
        ints(0, 40, tokens),
        torch.rand(40, rotary_dim, device=DEVICE),
    )
    expected, actual = reference.norm_rope(*args, neox=neox), kernel("norm_rope")(*args, neox=neox)
    # float32: order of the sum of squares only. bfloat16: that may move a result to the neighbouring value.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("rows, vocab", [(0, 8), (3, 1), (40, 100), (12, 2500), (6, 20_000)])
def test_seeded_draw(rows: int, vocab: int) -> None:
    weights = torch.rand(rows, vocab + 5, device=DEVICE)[:, :vocab] ** 8
    weights[:, 1::3] = 0.0
    weights[1::3, : vocab * 4 // 5] = 0.0  # parts of a row in which nobody runs
    if vocab > 1:
        weights[2::3, 2:] = 0.0
    seeds = ints(-(2**63), 2**63 - 1, rows)
    positions = ints(0, 2**20, rows)
    expected = reference.seeded_draw(weights, seeds, positions)
    actual = kernel("seeded_draw")(weights, seeds, positions)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("bs, width, vocab", [(0, 4, 8), (3, 1, 20), (4, 5, 12), (2, 16, 1500)])
def test_penalize_block(bs: int, width: int, vocab: int) -> None:
    logits = torch.randn(bs, width, vocab + 3, device=DEVICE)[..., :vocab]
    draft = ints(0, min(vocab, 6), bs, width)
    counts = ints(0, 3, 9, vocab, dtype=torch.int32)
    coefficients = torch.rand(9, 3, device=DEVICE) + 0.3
    rows = torch.randperm(9, device=DEVICE)[:bs]
    expected, actual = logits.clone(), logits.clone()
    reference.penalize_block(expected, draft, counts, rows, coefficients)
    kernel("penalize_block")(actual, draft, counts, rows, coefficients)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


ROWS, COLUMNS = 9, 5000  # more than two tiles of the search


def histories(bs: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of few tokens, so that matches of every length occur, some of them that cannot be copied; rows that are
    used, and lengths up to the table's end."""
    history = ints(-1, vocab, ROWS, COLUMNS, dtype=torch.int32)
    last = ints(1, COLUMNS - 1, bs)
    if bs > 2:
        last[:3] = torch.tensor([1, COLUMNS - 2, 40])
    return history, torch.randperm(ROWS, device=DEVICE)[:bs], last


@pytest.mark.parametrize("bs, width", [(0, 4), (1, 1), (3, 2), (8, 16), (4, 33)])
def test_note_tokens(bs: int, width: int) -> None:
    history, rows, last = histories(bs, 500)
    found, tokens = ints(0, 99, ROWS, 2), ints(0, 500, bs, width + 3)[:, :width]
    outcomes = []
    for note in (reference.note_tokens, kernel("note_tokens")):
        table, keys = history.clone(), found.clone()
        note(table, keys, rows, last, tokens)
        outcomes.append((table[:, :-1], keys))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)


@pytest.mark.parametrize("bs, vocab, bound", [(0, 9, 50), (1, 2, 4998), (8, 3, 4998), (8, 20, 9999), (4, 300, 4998)])
@pytest.mark.parametrize("lens_dtype", [torch.int32, torch.int64])
def test_find_copies(bs: int, vocab: int, bound: int, lens_dtype: torch.dtype) -> None:
    history, rows, last = histories(bs, vocab)
    expected, actual = torch.zeros(2, ROWS, 2, dtype=torch.int64, device=DEVICE)
    reference.find_copies(history, expected, rows, last.to(lens_dtype), longest=16, bound=bound)
    kernel("find_copies")(history, actual, rows, last.to(lens_dtype), longest=16, bound=bound)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("bs, width", [(0, 4), (3, 2), (9, 7), (9, 16), (9, 33)])
def test_offer_copies(bs: int, width: int) -> None:
    history, rows, last = histories(bs, 3)
    found = torch.zeros(ROWS, 2, dtype=torch.int64, device=DEVICE)
    reference.find_copies(history, found, rows, last, longest=6, bound=COLUMNS)
    tokens, margins = ints(0, 3, bs, width), torch.rand(bs, width + 2, device=DEVICE)[:, : width - 1]
    outcomes = []
    for offer in (reference.offer_copies, kernel("offer_copies")):
        block, keys = tokens.clone(), found.clone()
        offer(block, margins, history, keys, rows, last, least=5, unsure=0.7)
        outcomes.append((block, keys))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)
    assert bs < 9 or (outcomes[0][1][rows, 1] > 0).any()
