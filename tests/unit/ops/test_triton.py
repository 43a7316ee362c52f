"""The Triton kernels without a GPU: they equal their definitions, fit in registers and are compiled once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.ops import kernels
from tests.unit.ops.launches import Launch, record, tensor

TESTS = Path(__file__).parents[2]
CARDS = sorted((TESTS / "fixtures" / "cards").glob("*/drafter"))
KERNELS = sorted(file.stem for file in Path(kernels.__path__[0]).glob("*.py") if "@triton.jit" in file.read_text())
WIDTHS = (4, 5, 8, 16)
BATCHES = (1, 2, 3, 16, 512)
MOST_REGISTERS = 128  # of 255: four blocks of 128 threads then share a multiprocessor


def test_kernels_equal_their_definitions_under_the_interpreter() -> None:
    # A process of its own: Triton decides at import whether to interpret.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "ops_cases.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OPS_DEVICE": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout


def launches(kernel: str, card: Path, width: int, bs: int, skipped: int) -> Iterator[Launch]:
    """As a server of a published drafter launches ``kernel``.

    Args:
        skipped: entries cut off the front of what may be part of a longer tensor.
    """
    config = DrafterConfig.load(card)
    vocab = json.loads((card / "config.json").read_text())["vocab_size"]

    def longs(*shape: int) -> torch.Tensor:
        return tensor(*shape, skipped=skipped)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return tensor(*shape, dtype=dtype)

    def ints(*shape: int) -> torch.Tensor:
        return tensor(*shape, dtype=torch.int32)

    if kernel == "prepare_block":
        table = ints(bs, config.max_position_embeddings + 20)
        yield record(kernel, longs(bs), longs(bs), longs(bs), table, width=width, mask_token_id=config.mask_token_id)
    elif kernel == "accept_block":
        yield record(kernel, longs(bs, width), longs(bs, width), longs(bs))
    elif kernel == "norm_rope":
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rotation = longs(bs * width), floats(config.max_position_embeddings, config.rotary_dim)
        qkv = floats(bs * width, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16)
        weight = floats(1, heads + kv_heads, head_dim, dtype=torch.bfloat16)
        yield record(kernel, qkv[None, :, : heads + kv_heads], weight, 1e-6, *rotation)
        kv = floats(config.num_layers, bs * width, 2, kv_heads, head_dim, dtype=torch.bfloat16)
        weight = floats(config.num_layers, 2, head_dim, dtype=torch.bfloat16)[:, 1:].expand(-1, kv_heads, -1)
        yield record(kernel, kv[:, :, 0], weight, 1e-6, *rotation)
    elif kernel == "penalize_block":
        yield record(kernel, floats(bs, width, vocab), longs(bs, width), ints(512, vocab), longs(bs), floats(512, 3))
    elif kernel == "seeded_draw":
        yield record(kernel, floats(bs * width, vocab), longs(bs * width), longs(bs * width))
    else:
        raise ValueError(f"no launch is known of {kernel}")


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.parent.name)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_compiled_for_another_batch_or_width(kernel: str, card: Path) -> None:
    variants = [
        tuple(launch.key for launch in launches(kernel, card, width, bs, skipped))
        for width in WIDTHS
        for bs in BATCHES
        for skipped in (0, 1)
    ]
    assert set(variants) == {variants[0]}


def test_launches_stay_within_the_limits_of_a_grid() -> None:
    for card in CARDS:
        for kernel in KERNELS:
            for launch in launches(kernel, card, 16, 512, 0):
                assert all(size <= 65_535 for size in launch.grid[1:]), (card, launch)


@pytest.mark.parametrize("capability", [90, 100, 120])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_fit_in_registers_at_the_published_shapes(
    kernel: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    distinct = {
        launch.key: launch for card in CARDS for width in WIDTHS for launch in launches(kernel, card, width, 16, 0)
    }
    for launch in distinct.values():
        used = resources(launch.compile(capability), tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= MOST_REGISTERS, used


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """Registers a thread and bytes of memory, as the assembler gave them out."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in listing.splitlines() if "REG:" in line]
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}
