"""Stand-ins of compiled kernels, by their documented meaning: what a device's kernel reads as garbage is an error.

A stand-in is one node of an emulated graph: its numbers are those of the capture, its tensors those of the replay.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal import interpreter


class Misused(RuntimeError):
    """A kernel would refuse the call, or read what nobody wrote."""


def require(holds: Any, what: str, *values: Any) -> None:
    if not holds:
        raise Misused(f"{what}: {', '.join(map(str, values))}")


def unset(options: dict[str, Any]) -> None:
    """What SGLang leaves at its default is in no definition."""
    given = {name for name, value in options.items() if value}
    require(not given, "not in the definition", *given)


class _Executor:
    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with interpreter.pause(), torch.inference_mode():
            self.fn(*args, **kwargs)


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function that writes into its arguments a kernel: counted, captured, and checked for host tensors."""
    executor, path = _Executor(function), f"{function.__module__}.{function.__name__}"

    @functools.wraps(function)
    def launch(*args: Any, **kwargs: Any) -> None:
        interpreter.LAUNCHES[path] += 1
        if interpreter.recorders:
            interpreter.recorders[-1](executor, args, kwargs)
            return
        for check in interpreter.argument_checks:
            with interpreter.pause():
                check(path, [*interpreter._tensors((*args, *kwargs.values()))])
        executor(*args, **kwargs)

    return launch


def int32(name: str, tensor: Tensor, length: int | None = None) -> None:
    """Kernels take the address of such a tensor: its values one after the other, 32 bits each."""
    fits = tensor.dim() == 1 and tensor.is_contiguous() and (length is None or len(tensor) == length)
    require(tensor.dtype == torch.int32 and fits, name, tensor.dtype, tuple(tensor.shape), tensor.stride(), length)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, first: int = 0, causal: bool = True,
    window: tuple[int, int] = (-1, -1), cap: float = 0.0, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one request: ``q [w, H, D]``, ``k``, ``v [n, G, D]`` at positions from ``first`` on.

    Queries are the last positions. ``window`` counts positions before and after a query, -1 without an end. Returns
    the result and the natural logarithm of the sums ``[w, H]``; of a row that sees nothing, 0 and minus infinity.
    """
    width, heads, _ = q.shape
    keys, values = (each.float().repeat_interleave(heads // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("whd,nhd->hwn", q.float(), keys) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    of = torch.arange(first, first + len(k))[None]
    at = torch.arange(first + len(k) - width, first + len(k))[:, None]
    left, right = window[0], 0 if causal else window[1]
    unseen = (of < at - left if left >= 0 else of < 0) | (of > at + right if right >= 0 else of < 0)
    scores = scores.masked_fill(unseen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(heads, width, 1)], -1)
    sums = scores.logsumexp(-1)
    weights = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0)[..., None])[..., : len(k)]
    return torch.einsum("hwn,nhd->whd", weights, values), sums.T


def read_pages(caches: tuple[Tensor, Tensor], table: Tensor, length: int, width: int, left: int) -> tuple[Any, ...]:
    """Keys and values ``[pages, page, G, D]`` of the positions that ``width`` last queries see, and the first of them.

    Raises:
        Misused: the row of the page table ends early or names other memory, or a slot holds NaN, which is in all slots
            that nobody has written since they were handed out. Page 0, which rows of padding write, is anybody's.
    """
    page, first = caches[0].shape[1], 0 if left < 0 else max(0, length - width - left)
    require(length >= width, "fewer keys than queries", length, width)
    require(-(-length // page) <= len(table), "the page table ends before the request", len(table), page, length)
    pages = table[first // page : -(-length // page)].long()
    require(((pages >= 0) & (pages < len(caches[0]))).all(), "pages outside of the pool", pages.tolist())
    slots = (pages[:, None] * page + torch.arange(page)).flatten()[first % page :][: length - first]
    found = [cache[slots // page, slots % page] for cache in caches]
    for each in found:
        unwritten = each.flatten(1).float().isnan().any(1) & (slots >= page)
        require(not unwritten.any(), "slots that nobody wrote, of positions", unwritten.nonzero().flatten() + first)
    return *found, first
