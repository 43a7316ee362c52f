"""Compile what a rehearsal launched, ours and SGLang's, for absent GPUs.

``REHEARSE_LIST=FILE python -m tests.rehearsal`` lists the launches. ``python -m tests.rehearsal.compile FILE`` compiles
them, ``--triton 3.6.0`` with another release of Triton.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from tests.ops.launches import CARDS, chosen_compiler, compiled_for, compilers, tensor


def restored(described: Any) -> Any:
    """Return an argument for which Triton compiles what it did for the described one."""
    match described:
        case {"tensor": dtype, "aligned": aligned}:
            return tensor(16, dtype=getattr(torch, dtype), skipped=0 if aligned else 1)
        case {"dtype": name}:
            return tl.dtype(name)
        case {"function": path}:
            return kernel(path)
        case {"tuple": values}:
            return tuple(map(restored, values))
    assert not isinstance(described, dict), f"{described} cannot be restored"
    return described


def kernel(path: str) -> JITFunction[Any]:
    """Return the function under an autotuner or heuristics."""
    found = resolve_name(path)
    while not isinstance(found, JITFunction):
        found = found.fn
    return found


def failures(lines: Iterable[str], capability: int) -> list[str]:
    """Compile each line of a list. Return what cannot be compiled, with the reason."""
    failed = []
    for path, arguments in map(json.loads, lines):
        try:
            with compiled_for(capability):
                kernel(path)[(1,)](**{name: restored(value) for name, value in arguments.items()})
        except Exception as error:  # noqa: BLE001 - any error of a compiler is a result
            failed.append(f"{path}, sm_{capability}: {type(error).__name__}: {error}\n  {arguments}")
    return failed


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m tests.rehearsal.compile", description=__doc__)
    parser.add_argument("list", type=Path)
    asked = chosen_compiler(parser, CARDS)
    lines = sorted(set(asked.list.read_text().splitlines()))
    failed = [line for capability in asked.arch for line in failures(lines, capability)]
    kernels = len({json.loads(line)[0] for line in lines})
    print(*failed, f"{kernels} kernels, {len(lines)} launches, {len(failed)} failures; {compilers()}", sep="\n")
    sys.exit(bool(failed))
