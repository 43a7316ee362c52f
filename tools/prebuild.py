"""Compile ahead of time, for Hopper, the CUDA modules that SGLang compiles at run time; needs no GPU.

``python tools/prebuild.py COMPILER OUT`` fills the folder ``OUT`` with modules and ``index.json``: ``capability``, and
``modules``: "name|argument|..." of ``load_jit`` -> [file, exported names]. COMPILER is the folder of NVIDIA's compiler
as the Makefile installs it. SGLang's own ``load_jit`` compiles, and keeps what it compiled in ``SGLANG_JIT_CACHE_DIR``.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CAPABILITY = (9, 0)  # H100 and H200


def wanted() -> list[Callable[[], Any]]:
    """Return calls that load every module of the kit's rows: bfloat16, heads of 64, 128 and 256 values."""
    import torch
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import clamp_position, rope
    from sglang.kernels.ops.kvcache import kvcache
    from sglang.kernels.ops.layernorm import norm
    from sglang.kernels.ops.mamba import causal_conv1d
    from sglang.kernels.ops.moe import moe_align, moe_topk_softmax

    dtype, two = torch.bfloat16, (False, True)
    return [
        lambda: activation.activation_module(dtype),
        lambda: causal_conv1d._jit_causal_conv1d_module(dtype),
        *(lambda x=x: clamp_position._jit_clamp_position_module(x) for x in (torch.int32, torch.int64)),
        *(lambda n=n: kvcache._jit_kvcache_module(n, n, 0) for n in (2048, 1024, 256)),  # bytes of a token's K
        *(lambda n=n: rope._jit_fused_rope_module(True, n, dtype, dtype) for n in (128, 64, 16)),  # rotated values
        *(lambda n=n: norm._jit_qknorm_module(n, dtype) for n in (256, 128, 64)),
        *(lambda n=n: norm._jit_rmsnorm_module(n, dtype) for n in (2560, 256, 128, 64)),
        *(lambda x=x: norm._jit_fused_add_rmsnorm_module(dtype, x) for x in two),
        *(lambda x=x: moe_topk_softmax._jit_moe_topk_softmax_module(x) for x in (dtype, torch.float32)),
        *(lambda x=x, y=y: moe_align._jit_moe_align_module(torch.int32, x, False, y) for x in two for y in two),
    ]


def build(out: Path) -> None:
    import sglang.kernels.jit.utils as jit
    import torch
    from sglang.kernels.jit.utils import arch
    from sglang.kernels.jit.utils.compile import loader

    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *args: CAPABILITY
    arch.is_cuda = lambda: True
    loader._load = lambda library: library.read_bytes()
    compiled, modules = loader.load_jit, {}

    def keep(*args: Any, **options: Any) -> None:
        key = "|".join(map(str, args))
        file = out / f"{args[0]}-{hashlib.sha1(key.encode()).hexdigest()[:8]}.so"
        file.write_bytes(compiled(*args, **options))
        subprocess.run(["strip", "--strip-unneeded", str(file)], check=True)
        modules[key] = [file.name, [export for export, _ in options["cuda_wrappers"]]]
        print(f"{file.stat().st_size >> 10:5} KiB  {key}", flush=True)

    jit.load_jit = keep  # before the operations are imported
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda load: load(), wanted()))
    (out / "index.json").write_text(json.dumps({"capability": CAPABILITY, "modules": modules}, indent=1))


if __name__ == "__main__":
    toolkit, folder = Path(sys.argv[1], "nvidia/cu13").absolute(), Path(sys.argv[2]).absolute()
    libraries = toolkit / "lib64"  # where the linker looks, with the name that it is given
    libraries.mkdir(exist_ok=True)
    if not (runtime := libraries / "libcudart.so").exists():
        runtime.symlink_to(toolkit / "lib/libcudart.so.13")
    os.environ |= {"CUDA_HOME": str(toolkit), "PATH": f"{toolkit / 'bin'}:{os.environ['PATH']}"}
    os.environ["SGLANG_JIT_CACHE_DIR"] = f"{folder}.jit"
    build(folder)
