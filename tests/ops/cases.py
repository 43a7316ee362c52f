"""Every Triton kernel against its torch definition, on random inputs.

Not collected by itself: tests/ops/test_triton.py runs it under Triton's interpreter (``TRITON_INTERPRET=1``), tests/gpu
on a device (``OPS_DEVICE=cuda``).
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_dflash import ops
from sglang_dflash.ops import Noise
from sglang_dflash.ops.reference import step
from tests.ops.device import DEVICE

MODULES = ("block", "copies", "model", "sampling")


def compare(
    name: str, *args: Any, tolerance: float = 0.0, seen: Callable[..., Any] = lambda *args: args, **options: Any
) -> list[Any]:
    """Run definition and kernel on copies of the arguments; compare the results, and the arguments afterwards."""
    modules = (importlib.import_module(f"sglang_dflash.ops.kernels.{module}") for module in MODULES)
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    outcomes = []
    for run in (inspect.unwrap(getattr(ops, name)), kernel):
        own = copy.deepcopy(args)  # keeps the strides
        result = run(*own, **options)
        outcomes.append([*(result if isinstance(result, tuple) else [result]), *seen(*own)])
    torch.testing.assert_close(*outcomes, rtol=tolerance, atol=min(tolerance, 1e-6), equal_nan=True)
    return outcomes[0]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("bs", "width", "lens"), [(0, 4, torch.int32), (3, 1, torch.int64), (5, 7, torch.int32), (4, 33, torch.int64)]
)
def test_prepare_block(bs: int, width: int, lens: torch.dtype) -> None:
    table = ints(1, 10_000, 9, 64, dtype=torch.int32)
    args = (ints(0, 500, bs), ints(0, 63, bs, dtype=lens), ints(0, 9, bs, dtype=lens), table)
    states = ints(0, 99, 9, dtype=torch.int32)
    for table in (None, states):
        compare("prepare_block", *args, width=width, mask_token_id=511, state_table=table)


@pytest.mark.parametrize(("bs", "width", "drafted"), [(0, 4, 4), (3, 2, 2), (5, 7, 7), (4, 33, 16)])
def test_take_drafts(bs: int, width: int, drafted: int) -> None:
    # Of a graph's padded output; past the drafter's block its last draft is repeated.
    drafts, broken, total = ints(0, 5, bs + 2, drafted - 1)[:bs], ints(0, 9, bs), ints(0, 9)
    for margins in (None, torch.rand(bs + 2, drafted - 1, device=DEVICE)[:bs]):
        tokens = ints(0, 500, bs, width)
        tokens[:, 1:] = 3  # the mask token, which some drafts are
        compare("take_drafts", tokens, drafts, broken, total, margins)


@pytest.mark.parametrize(("bs", "width"), [(0, 4), (6, 1), (50, 7), (8, 33)])
def test_accept_block(bs: int, width: int) -> None:
    # Two tokens only, so that every accept length occurs; a row stride that is not the width, as in a graph's buffer.
    draft, target = ints(0, 2, bs, width + 3)[:, :width], ints(0, 2, bs, width)
    if bs:
        target[0, :-1] = draft[0, 1:]
    for interval in (0, 1, 16):
        compare("accept_block", draft, target, ints(1, 9_000, bs), interval=interval)


@pytest.mark.parametrize(("bs", "width", "columns"), [(1, 2, 8), (3, 5, 100), (2, 16, 2500)])
def test_stage_block(bs: int, width: int, columns: int) -> None:
    tokens = bs * width
    hidden, memory = torch.randn(tokens, columns, device=DEVICE), torch.zeros(tokens + 3, columns, device=DEVICE)
    block = ints(0, 900, tokens), ints(1, 900, tokens), ints(1, width + 1, bs, dtype=torch.int32)
    staged = memory, ints(0, 9, tokens + 3), ints(0, 9, tokens + 3)
    compare("stage_block", hidden, *block, *staged, seen=lambda *given: given[4:])


@pytest.mark.parametrize(("bs", "width", "size", "window", "page"), [(3, 1, 40, 30, 1), (7, 8, 1100, 1024, 16)])
def test_view_rings(bs: int, width: int, size: int, window: int, page: int) -> None:
    table, oldest = ints(0, 9, 9, size + 4, dtype=torch.int32), ints(0, 40, 9)
    rows, lens = torch.randperm(8, device=DEVICE)[:bs] + 1, ints(40, 3000, bs)
    lens[:1] = 40  # nothing has left the window yet
    positions = (lens[:, None] + torch.arange(width, device=DEVICE)).flatten()
    sizes = {"first": page, "size": size, "window": window, "page": page}
    compare("view_rings", table, oldest, rows, lens, positions, seen=lambda table, *_: (table,), **sizes)


@pytest.mark.parametrize(
    ("layers", "tokens", "heads", "head_dim", "rotary_dim", "neox", "dtype", "weight_per_head"),
    [
        (2, 0, 2, 8, 8, True, torch.float32, True),
        (3, 5, 2, 64, 64, True, torch.bfloat16, False),
        (1, 4, 6, 96, 32, True, torch.float32, True),
        (1, 4, 6, 96, 32, False, torch.bfloat16, True),
        (2, 3, 1, 64, 64, False, torch.float32, False),
    ],
)
def test_norm_rope(
    layers: int, tokens: int, heads: int, head_dim: int, rotary_dim: int, neox: bool, dtype: torch.dtype,
    weight_per_head: bool,
) -> None:  # fmt: skip
    # Queries, keys and values are results of one projection, so the heads are a strided part of it.
    projected = torch.randn(layers, tokens, 2, heads, head_dim, device=DEVICE).to(dtype)
    norm_weight = torch.rand(layers, heads if weight_per_head else 1, head_dim, device=DEVICE).to(dtype)
    angles = torch.rand(40, rotary_dim, device=DEVICE)
    args = (projected[:, :, 0], norm_weight.expand(-1, heads, -1), 1e-6, ints(0, 40, tokens), angles)
    # float32: order of the sum of squares only. bfloat16: that may move a result to the neighbouring value.
    compare("norm_rope", *args, neox=neox, tolerance={torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype])


@pytest.mark.parametrize(("rows", "vocab"), [(0, 8), (3, 1), (12, 600), (2, 9000)])
def test_seeded_tokens(rows: int, vocab: int) -> None:
    # With -inf where a grammar forbids tokens: leading tiles of some rows.
    # Flat rows, in which a token more or less would often win, and peaked ones.
    logits = torch.randn(rows, vocab + 5, device=DEVICE)[:, :vocab] * 0.2
    logits[1::4] *= 20
    logits[::3, : vocab * 4 // 5] = -torch.inf
    temperatures, seeds = torch.rand(rows, 1, device=DEVICE) + 0.2, ints(-(2**63), 2**63 - 1, rows)
    row = torch.arange(rows, device=DEVICE)  # twelve rows have as many pairs of limits
    top_ks = torch.tensor([1, 3, 40, 1 << 30], dtype=torch.int32, device=DEVICE)[row % 4]
    top_ps = torch.tensor([0.02, 0.5, 0.97, 1.0], device=DEVICE)[row // 3 % 4]
    min_ps = torch.tensor([0.0, 0.0, 0.1], device=DEVICE)[row % 3]
    for filters in (None, (top_ks, top_ps, min_ps)):
        compare("seeded_tokens", logits, temperatures, filters, seeds, ints(0, 2**20, rows))


def test_a_row_of_top_k_1_takes_the_first_of_its_largest_logits() -> None:
    logits = torch.randn(4, 1100, device=DEVICE)
    logits[:, [700, 1000, 3]] = 9.0
    one, ones = torch.ones(4, dtype=torch.int32, device=DEVICE), torch.ones(4, device=DEVICE)
    asked = logits, ones[:, None], (one, ones, 0 * ones), ints(0, 99, 4), ints(0, 99, 4)
    assert (compare("seeded_tokens", *asked)[0] == 3).all()


@pytest.mark.parametrize(("rows", "vocab"), [(0, 8), (3, 1), (12, 600), (6, 9_001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_leading_tokens(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Of few values, so that most rows have ties, in one tile of a row and across tiles; padding is larger."""
    drawn = (torch.randn(rows, vocab + 8, device=DEVICE) * 2).round().to(dtype)
    drawn[:, vocab:] = torch.inf
    logits = drawn[:, :vocab]
    for row, special in enumerate((0.0, torch.inf, torch.nan, -torch.inf)[:rows]):
        logits[row], at = (-1.0 if special == 0 else -torch.inf), ints(0, vocab, 3).sort().values
        logits[row, at] = special
        logits[row, at[0]] = -abs(special)  # equals 0.0, or any NaN; smaller than infinity
    _, tokens, *_ = compare("leading_tokens", logits, 1, seen=lambda *_: ())
    assert torch.equal(tokens[:, 0], logits.float().argmax(-1))  # SGLang's: the conversion keeps order and ties
    for noise in (None, noise_of(max(1, rows // 3))):
        compare("leading_tokens", logits, min(vocab, 16), noise, seen=lambda *_: ())


def noise_of(requests: int) -> Noise:
    """Of greedy and of sampled requests."""
    temperatures, top_ps, min_ps = torch.rand(3, requests, device=DEVICE)
    top_ps[::2] = 1.0
    top_ks = ints(2, 9, requests, dtype=torch.int32)
    top_ks[1::3] = 1
    return Noise(ints(-(2**63), 2**63 - 1, requests), temperatures + 0.2, top_ks, top_ps, 0.3 * min_ps)


@pytest.mark.parametrize(("bs", "n", "vocab"), [(0, 3, 20), (1, 1, 16), (2, 15, 600), (2, 3, 9_001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_likeliest_tokens(bs: int, n: int, vocab: int, dtype: torch.dtype) -> None:
    """As the target would draw them where they are unsure; with ties, which the first wins."""
    logits = torch.randn(bs, n, vocab + 8, device=DEVICE).mul(2).to(dtype)[:, :, :vocab]
    logits[:, :1] *= 9
    positions, noise = ints(0, 9000, bs, 16)[:, 0], noise_of(bs)
    drawn, _ = compare("likeliest_tokens", logits, 16, positions, noise, tolerance=1e-5, seen=lambda *_: ())
    others = drawn != logits.float().argmax(-1)
    assert not others[noise.top_ks == 1].any() and (bs < 2 or others.any())


@pytest.mark.parametrize(("bs", "width", "vocab"), [(0, 4, 8), (3, 1, 20), (4, 5, 12), (2, 16, 1500)])
def test_penalize_block(bs: int, width: int, vocab: int) -> None:
    logits = torch.randn(bs, width, vocab + 3, device=DEVICE)[..., :vocab]
    draft, counts = ints(0, min(vocab, 6), bs, width), ints(0, 3, 9, vocab, dtype=torch.int32)
    coefficients = torch.rand(9, 3, device=DEVICE) + 0.3
    rows = torch.randperm(9, device=DEVICE)[:bs]
    compare("penalize_block", logits, draft, counts, rows, coefficients, tolerance=1e-6)


ROWS, COLUMNS = 9, 5000  # more than two tiles of the search


def histories(bs: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of few tokens, so that matches of every length occur, some of them that cannot be copied; rows that are
    used, and lengths up to the table's end."""
    history = ints(-1, vocab, ROWS, COLUMNS, dtype=torch.int32)
    last = ints(1, COLUMNS - 1, bs)
    if bs > 2:
        last[:3] = torch.tensor([1, COLUMNS - 2, 40])
    return history, torch.randperm(ROWS, device=DEVICE)[:bs], last


@pytest.mark.parametrize(
    ("bs", "width", "vocab", "bound", "lens"),
    [
        (0, 4, 9, 50, torch.int64),
        (1, 1, 2, 4998, torch.int32),
        (8, 16, 3, 4998, torch.int64),
        (8, 33, 20, 9999, torch.int32),
    ],
)
def test_match_copies(bs: int, width: int, vocab: int, bound: int, lens: torch.dtype) -> None:
    history, rows, last = histories(bs, vocab)
    after = (last - ints(1, width + 1, bs)).clamp(min=0)
    tokens = ints(0, vocab, bs, width + 3)[:, :width]
    # Of a step before, or cleared.
    found = torch.zeros(ROWS, 2, dtype=torch.int64, device=DEVICE)
    found[rows[::2], 0] = (last[::2] << 36) - 1
    args = history, found, rows, after.to(lens), tokens, last.to(lens)
    # Positions past the table: the definition writes them to the last column, the kernel nowhere.
    compare("match_copies", *args, longest=16, bound=bound, seen=lambda table, keys, *_: (table[:, :-1], keys))


@pytest.mark.parametrize(("bs", "width"), [(0, 4), (3, 2), (9, 16), (9, 33)])
def test_take_copies(bs: int, width: int) -> None:
    history, rows, last = histories(bs, 3)
    found = torch.zeros(ROWS, 2, dtype=torch.int64, device=DEVICE)
    newest = history[rows].gather(1, last[:, None]).long()
    step.match_copies(history, found, rows, last - 1, newest, last, longest=6, bound=COLUMNS)
    tokens, margins = ints(0, 3, bs, width), ints(-1, 8, bs, width + 2)[:, : width - 1].float()  # 4.0, too
    margins[margins == 7] = float("nan")
    _, _, _, _, after, *_ = compare("take_copies", tokens, margins, history, found, rows, last, least=5, margin=4.0)
    assert bs < 9 or (after[rows, 1] > 0).any()


# The arithmetic is float32 in any dtype: the sums' order moves a result to the neighbouring value at most.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.mark.parametrize(
    ("bs", "width", "taps", "channels"), [(0, 4, 2, 64), (1, 16, 2, 1280), (3, 5, 3, 96), (2, 2, 4, 32)]
)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_convolve_block(bs: int, width: int, taps: int, channels: int, dtype: torch.dtype) -> None:
    hidden, base = (torch.randn(rows, channels, device=DEVICE).to(dtype) for rows in (bs * width, taps))
    corrections = torch.randn(bs * width, 2, taps, channels // 16, device=DEVICE).to(dtype)[:, 1]  # of one side
    compare("convolve_block", hidden, base, corrections, width=width, tolerance=ROUNDING[dtype])


WALKS = [(0, 4, 4, 8), (1, 15, 16, 256), (3, 7, 8, 32), (2, 1, 5, 24), (4, 3, 1, 8), (3, 7, 16, 0), (3, 4, 5, 0)]


@pytest.mark.parametrize(("bs", "n", "k", "rank"), WALKS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_walk_candidates(bs: int, n: int, k: int, rank: int, dtype: torch.dtype) -> None:
    candidates = torch.rand(bs, n, 300, device=DEVICE).topk(k).indices
    predecessors, successors = torch.randn(2, 300, rank, device=DEVICE).to(dtype).unbind()
    gates, unary = torch.randn(bs, n, rank, device=DEVICE).to(dtype), torch.randn(bs, n, k, device=DEVICE)
    anchors, positions = ints(0, 300, bs, 16)[:, 0], ints(0, 9000, bs, 16)[:, 0]  # columns of the block
    walk = candidates, unary, anchors, positions
    codebooks = (gates, predecessors, successors) if rank else None
    best, *_ = compare("walk_candidates", *walk, codebooks=codebooks, tolerance=1e-4)
    noise = noise_of(bs)
    drawn, *_ = compare("walk_candidates", *walk, noise, codebooks, tolerance=1e-4)
    assert rank or not torch.equal(drawn, best)  # codebooks make the best candidate sure
    of_greedy = noise._replace(top_ks=noise.top_ks // 99 + 1)
    greedy, *_ = compare("walk_candidates", *walk, of_greedy, codebooks, tolerance=1e-4)
    assert torch.equal(greedy, best)


def test_a_walk_takes_the_first_of_equal_candidates() -> None:
    candidates = ints(0, 300, 2, 3, 8)
    equal = candidates, torch.ones(2, 3, 8, device=DEVICE), ints(0, 9, 2), ints(0, 9, 2)
    books = torch.zeros(300, 4, device=DEVICE)
    for codebooks in (None, (torch.zeros(2, 3, 4, device=DEVICE), books, books)):
        tokens, leads, *_ = compare("walk_candidates", *equal, codebooks=codebooks)
        assert torch.equal(tokens, candidates[..., 0]) and not leads.any()
