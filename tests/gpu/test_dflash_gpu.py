"""On a CUDA device, in bfloat16: the GPU kit's steps pass, with every attention backend that is installed.

Texts equal plain decoding's up to a near-tie, as graphs and eager; no step waits for the device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.gpu import checks, records, tiny
from tools.gpu.run import Run
from tools.gpu.site import CUDA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that this torch can use"),
]


PAIRS = ("tiny-dense", "tiny-hybrid", "tiny-moe")
# Arm -> number of widths, of a block of 32 and of 16.
WIDTHS = {"graphs at random widths with copies": 6, "eager at random widths with copies": 5}


def test_kernels_equal_their_definitions(tmp_path: Path) -> None:
    assert checks.kernels(Run(CUDA, tmp_path, "kernels"))


@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_equal_plain_decoding(pair: str, tmp_path: Path) -> None:
    assert tiny.engine(Run(CUDA, tmp_path, "engine", (pair,), tuple(tiny.ARMS)))
    rows = [row for row in records.read(tmp_path, "engine") if "steps_by_width" in row]
    assert len(rows) >= len(tiny.ARMS) - 1
    for row in rows:
        assert len(row["steps_by_width"]) == WIDTHS.get(row["arm"], 1)
        assert row["states"] == "kept"


def test_tokens_equal_plain_decoding_with_states_replayed(tmp_path: Path) -> None:
    assert tiny.replay(Run(CUDA, tmp_path, "replay"))
    assert {row["states"] for row in records.read(tmp_path, "replay") if "states" in row} == {"replayed"}


def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    assert tiny.nosync(Run(CUDA, tmp_path, "nosync", PAIRS))
