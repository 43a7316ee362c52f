"""The kit's stand-ins compute what the documented kernels compute, on small tensors."""

from __future__ import annotations

import ast
import inspect
from importlib.machinery import SourceFileLoader
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.ops.reference import step
from tools.gpu import site
from tools.gpu.standins import jit, plugin

sgl_kernel: Any = SourceFileLoader("stand_in", str(site.STAND_INS / "sgl_kernel/__init__.py")).load_module()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rotated(heads: Tensor, angles: Tensor, neox: bool) -> Tensor:
    """Pairs of elements turned as complex numbers."""
    half = angles.shape[-1]
    turned, rest = heads.split([2 * half, heads.shape[-1] - 2 * half], -1)
    pairs = turned.unflatten(-1, (2, half)).unbind(-2) if neox else turned.unflatten(-1, (half, 2)).unbind(-1)
    product = torch.complex(*pairs) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([torch.stack([product.real, product.imag], -2 if neox else -1).flatten(-2), rest], -1)


@pytest.mark.parametrize("neox", [True, False])
def test_rope_turns_the_first_part_of_a_head_and_stores_it(neox: bool) -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    table = torch.randn(16, 2)
    positions, slots = torch.tensor([3, 0, 9]), torch.tensor([5, 1, 2], dtype=torch.int32)
    expected = [rotated(heads, table[positions], neox) for heads in (q, k)]
    caches = torch.zeros(6, 2, 8), torch.zeros(6, 16)
    module = jit.load_jit("fused_rope", str(neox).lower(), "4", cuda_wrappers=[("run_rope_store", "F::run")])
    module.run_rope_store(q, k, v, *caches, torch.cat([table.cos(), table.sin()], -1), positions, slots)
    stored = [cache[slots.long()].view(3, 2, 8) for cache in caches]
    torch.testing.assert_close([q, k, *stored], [*expected, expected[1], v])
    assert not caches[0][[0, 3, 4]].any()


def test_simulated_accept_lengths_take_every_call_of_the_package() -> None:
    taken = inspect.signature(plugin.simulated(step.accept_block, int), follow_wrapped=False)
    trees = [ast.parse(path.read_text()) for path in (site.ROOT / "sglang_dflash").rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ours = [node for node in calls if ast.unparse(node.func).endswith("accept_block")]
    assert any(node.keywords for node in ours)
    for node in ours:
        taken.bind(*node.args, **{str(keyword.arg): keyword for keyword in node.keywords})


def test_experts_are_aligned_to_blocks() -> None:
    """The example of SGLang's own function, whose experts are numbered from 1, and a filtered one in front."""
    topk_ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, -1]], dtype=torch.int32)
    places, experts, padded = torch.zeros(40, dtype=torch.int32), torch.zeros(10, dtype=torch.int32), torch.zeros(1)
    sgl_kernel.moe_align_block_size(topk_ids, 6, 4, places, experts, padded, None, True, False)
    assert padded.tolist() == [20]
    assert places.tolist()[:20] == [11, 12, 12, 12, 3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 12, 12, 2, 5, 8, 12]
    assert experts.tolist()[:5] == [-1, 1, 2, 3, 4]
