"""The Triton kernels without a GPU: interpreted, they equal their definitions; they compile for two GPUs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

CASES = Path(__file__).parents[2] / "ops_cases.py"

# Argument types and constants of one launch; `*x` is a pointer to x.
LAUNCHES: dict[str, tuple[list[str], dict[str, object]]] = {
    "prepare_block": (
        ["*i64", "*i64", "*i64", "*i32", "*i64", "*i64", "*i64", "i32", "i32", "i32", "i32"],
        {"LANES": 16},
    ),
    "accept_block": (["*i64", "*i64", "*i64", "*i32", "*i64", "*i64", "i32", "i32", "i32"], {"LANES": 16}),
    "norm_rope": (
        ["*bf16", "*bf16", "*i64", "*fp32", "*bf16", "fp32"] + ["i32"] * 10,
        {"NEOX": True, "HEADS": 8, "LANES": 128},
    ),
    "penalize_block": (
        ["*fp32", "*i64", "*i32", "*i64", "*fp32", "i32", "i32", "i32", "i32"],
        {"LANES": 1024},
    ),
    "seeded_draw": (["*fp32", "*i64", "*i64", "*i64", "i32", "i32"], {"LANES": 1024}),
}


def test_kernels_equal_their_definitions_under_the_interpreter() -> None:
    # A process of its own: Triton decides at import whether to interpret.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OPS_DEVICE": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernel_compiles_without_a_gpu(name: str, capability: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types, constants = LAUNCHES[name]
    kernel = getattr(importlib.import_module(f"sglang_dflash.ops.kernels.{name}"), f"{name}_kernel")
    signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
