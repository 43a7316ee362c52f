"""SGLang's ``load_jit`` with the modules of the wheelhouse, which ``tools/prebuild.py`` compiled."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tools.gpu import rows

LOG = "GPU_KIT_OUT"  # folder of the rows of what was handed out or missing


@cache
def index() -> tuple[Path, dict[str, Any]]:
    """Return the folder of the packed modules, and file and exports by key; none for another device than theirs."""
    folder = Path(os.environ["GPU_KIT_MODULES"])
    made: dict[str, Any] = json.loads((folder / "index.json").read_text())
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return folder, made["modules"] if here in (None, tuple(made["capability"])) else {}


def load(key: str) -> Any:
    folder, modules = index()
    file, exports = modules[key]
    import tvm_ffi  # before a module, which needs its library; libcudart is torch's

    module = tvm_ffi.load_module(str(folder / file))
    for name in exports:
        module.get_function(name)  # raises if the module lacks it
    return module


@torch.compiler.disable
def load_jit(compile_now: Any, *args: Any, **options: Any) -> Any:
    """Return the packed module; SGLang compiles one that is not packed, which needs its sources and a compiler."""
    key = "|".join(map(str, args))
    packed = key in index()[1]
    if folder := os.environ.get(LOG):
        rows.append(Path(folder), key=key, packed=packed)
    return load(key) if packed else compile_now(*args, **options)
