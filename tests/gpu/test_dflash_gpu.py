"""On a CUDA device, in bfloat16: more arms than the GPU kit's one call has.

Texts equal plain decoding's up to a near-tie, as graphs and eager; no step waits for the device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.gpu import rows
from tools.gpu.__main__ import CASES, case_jobs
from tools.gpu.call import Call, Job
from tools.gpu.site import CUDA
from tools.gpu.texts import COPIES, STRICT, WIDTHS, Arm, jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that this torch can use"),
]

CACHED = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")
ANY_PAIR = {
    "planned": Arm(),
    "eager": Arm(("--disable-cuda-graph",)),
    "without overlap": Arm(("--disable-overlap-schedule",)),
    "random widths, copies": Arm(COPIES),
    "eager at random widths": Arm((*WIDTHS, "--disable-cuda-graph")),
    "random widths, waits raise": STRICT,
}
# Arm -> number of widths, of a block of 32 and of 16.
STEPPED = {"random widths, copies": 6, "eager at random widths": 5, "random widths, waits raise": 5}
OF_HYBRIDS = {
    "prefix hits": Arm(CACHED, caches=True),
    "padding rows": Arm(("--cuda-graph-bs-decode", "3")),
    "draft window": Arm(("--speculative-draft-window-size", "64")),
    # A hit in the middle of a window shortens it.
    "hits in a window": Arm((*WIDTHS, *CACHED, "--speculative-draft-window-size", "24"), caches=True),
}
RANKS = ("--tp-size", "2", "--attn-dp-size", "2", "--enable-dp-lm-head", "--dist-timeout", "60")
OF_RANKS = {"DP attention": Arm(RANKS), "DP attention, adaptive": Arm((*RANKS, "--speculative-adaptive"))}


def run(folder: Path, work: list[Job]) -> list[rows.Row]:
    """Run the jobs on 24 GiB of the device; return their rows."""
    Call(CUDA, folder, 24, 1500).run(work)
    found = rows.read(folder)
    assert not [row for row in found if "error" in row]
    return found


@pytest.mark.timeout(1800)
def test_kernels_equal_their_definitions(tmp_path: Path) -> None:
    run(tmp_path, case_jobs(CASES))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", ["tiny-dense", "tiny-hybrid", "tiny-moe"])
def test_tokens_equal_plain_decoding(pair: str, tmp_path: Path) -> None:
    found = {row["arm"]: row for row in run(tmp_path, jobs(pair, ANY_PAIR, real=True)) if "widths" in row}
    assert found.keys() == ANY_PAIR.keys()
    for name, row in found.items():
        assert len(row["widths"]) == STEPPED.get(name, 1), row


@pytest.mark.timeout(1800)
def test_tokens_of_a_hybrid_equal_plain_decoding(tmp_path: Path) -> None:
    run(tmp_path, jobs("tiny-hybrid", OF_HYBRIDS, real=True))


@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices that this torch can use")
def test_tokens_of_two_ranks_equal_plain_decoding(tmp_path: Path) -> None:
    """A collective operation whose ranks differ ends after a minute."""
    run(tmp_path, jobs("tiny-moe", OF_RANKS, real=True))
