"""The list of a rehearsal's launches compiles for an absent GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.rehearsal.compile import failures

PROGRAM = """
import torch
from tests.rehearsal import interpreter
interpreter.install()
from sglang_dflash.ops.kernels.block import accept_block
rows = torch.ones(2, 4, dtype=torch.int64)
for _ in range(2):
    accept_block(rows, rows, torch.ones(2, dtype=torch.int64))
"""


def test_a_listed_launch_compiles_once_and_one_that_does_not_is_named(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "REHEARSE_LIST": str(tmp_path / "list")}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    [line] = (tmp_path / "list").read_text().splitlines()
    assert not failures([line], 90)
    [failure] = failures([line.replace('"int64"', '"complex64"')], 90)
    assert failure.startswith("sglang_dflash.ops.kernels.block.accept_block_kernel, sm_90: ")
