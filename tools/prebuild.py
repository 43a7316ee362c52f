"""Compile ahead of time, for Hopper, the CUDA modules that SGLang compiles at run time; needs no GPU.

``python tools/prebuild.py COMPILER OUT`` fills the folder ``OUT`` with modules and ``index.json`` (:data:`INDEX`). COMPILER
is the folder of NVIDIA's compiler as the Makefile installs it. Finished modules are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CAPABILITY = (9, 0)  # H100 and H200
INDEX = "index.json"  # ``capability``; ``modules``: "name|argument|..." of ``load_jit`` -> [file, exported names]


def wanted() -> None:
    """Request every module of the kit's rows: bfloat16 targets of 64, 128 and 256 values per head."""
    import torch
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import clamp_position, rope
    from sglang.kernels.ops.kvcache import kvcache
    from sglang.kernels.ops.layernorm import norm
    from sglang.kernels.ops.mamba import causal_conv1d
    from sglang.kernels.ops.moe import moe_align, moe_topk_softmax

    dtype = torch.bfloat16
    activation.activation_module(dtype)
    clamp_position._jit_clamp_position_module(torch.int64)
    clamp_position._jit_clamp_position_module(torch.int32)
    causal_conv1d._jit_causal_conv1d_module(dtype)
    rope._jit_rotary_embedding_module()
    for size in (2048, 1024, 256):  # bytes of a token's K
        kvcache._jit_kvcache_module(size, size, 0)
    for size in (128, 64, 16):  # rotated values of a head
        rope._jit_fused_rope_module(True, size, dtype, dtype)
    for size in (256, 128, 64):
        norm._jit_qknorm_module(size, dtype)
    for size in (2560, 256, 128, 64):
        norm._jit_rmsnorm_module(size, dtype)
    for flag in (False, True):
        norm._jit_fused_add_rmsnorm_module(dtype, flag)
    for scores in (dtype, torch.float32):
        moe_topk_softmax._jit_moe_topk_softmax_module(scores)
    for flags in ((False, False, False), (False, False, True), (True, False, False), (True, False, True)):
        moe_align._jit_moe_align_module(torch.int32, *flags)


def requests() -> dict[str, dict[str, Any]]:
    """Return the arguments of ``load_jit`` that :func:`wanted` leads to, by key, as if on the device."""
    import sglang.kernels.jit.utils as jit
    import torch
    from sglang.kernels.jit.utils import arch
    from sglang.kernels.jit.utils.compile import loader

    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *args: CAPABILITY
    arch.is_cuda = lambda: True
    found: dict[str, dict[str, Any]] = {}
    jit.load_jit = loader.load_jit = lambda *args, **options: found.setdefault("|".join(map(str, args)), options)
    wanted()
    return found


def compiled(key: str, options: dict[str, Any], out: Path) -> str:
    """Compile one module with SGLang's own flags, and return its file's name."""
    from sglang.kernels.jit.utils.arch import get_default_target_flags
    from sglang.kernels.jit.utils.compile import ninja, paths
    from sglang.kernels.jit.utils.compile.spec import BuildSpec, resolve_sources

    def given(name: str) -> list[Any]:
        return list(options.get(name) or ())

    assert not given("extra_dependencies"), f"{key} needs other people's headers"
    spec = BuildSpec(
        module_args=tuple(key.split("|")),
        cpp_files=resolve_sources(given("cpp_files")),
        cuda_files=resolve_sources(given("cuda_files")),
        cpp_wrappers=tuple(given("cpp_wrappers")),
        cuda_wrappers=tuple(given("cuda_wrappers")),
        cflags=(*paths.DEFAULT_CFLAGS, *given("extra_cflags")),
        cuda_cflags=(*get_default_target_flags(), *given("extra_cuda_cflags")),
        ldflags=(*paths.DEFAULT_LDFLAGS, *given("extra_ldflags")),
        include_paths=(*paths.DEFAULT_INCLUDE, *given("extra_include_paths")),
        header_only=options.get("header_only", True),
    )
    name = f"{key.split('|')[0]}-{hashlib.sha1(key.encode()).hexdigest()[:8]}.so"
    folder = out / name.removesuffix(".so")
    built = ninja.build(spec=spec, build_dir=folder, build_file=ninja.generate(spec))
    subprocess.run(["strip", "--strip-unneeded", "-o", str(out / name), str(built)], check=True)
    shutil.rmtree(folder)
    return name


def build(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    asked, file = requests(), out / INDEX
    index: dict[str, Any] = json.loads(file.read_text())["modules"] if file.exists() else {}
    missing = [key for key in asked if key not in index]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for key, name in zip(missing, pool.map(lambda key: compiled(key, asked[key], out), missing), strict=True):
            index[key] = [name, [export for export, _ in asked[key].get("cuda_wrappers") or ()]]
            file.write_text(json.dumps({"capability": CAPABILITY, "modules": index}, indent=1, sort_keys=True))
            print(f"{(out / name).stat().st_size >> 10:5} KiB  {key}", flush=True)


if __name__ == "__main__":
    toolkit = Path(sys.argv[1], "nvidia/cu13").absolute()
    libraries = toolkit / "lib64"  # where compilers look, with the name that they link
    libraries.mkdir(exist_ok=True)
    runtime = libraries / "libcudart.so"
    if not runtime.exists():
        runtime.symlink_to(toolkit / "lib/libcudart.so.13")
    os.environ |= {"CUDA_HOME": str(toolkit), "PATH": f"{toolkit / 'bin'}:{os.environ['PATH']}"}
    build(Path(sys.argv[2]).absolute())
