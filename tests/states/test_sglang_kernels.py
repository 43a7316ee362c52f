"""SGLang's and FlashInfer's kernels of the gated delta net: run with ours, and facts of their source."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

pytestmark = pytest.mark.sglang

OPS, FLASHINFER = "sglang/kernels/ops/attention", "flashinfer/gdn_kernels"


def source(path: str) -> str:
    """Of an installed module, which is not imported: some need a GPU."""
    package = importlib.util.find_spec(path.partition("/")[0])
    if package is None or package.origin is None:
        pytest.skip(f"{path} is not installed")
    return (Path(package.origin).parents[1] / path).read_text()


def test_sglangs_kernels_agree_with_ours_under_the_interpreter() -> None:
    # A process of its own: Triton decides at import whether to interpret.
    cases = Path(__file__).with_name("sglang_cases.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout


@pytest.mark.parametrize(
    "path",
    [f"{OPS}/cutedsl_gdn_mtp_ring.py", f"{FLASHINFER}/gdn_decode_mtp.py", f"{FLASHINFER}/gdn_decode_bf16_state.py"],
)
def test_flashinfers_verify_writes_states_by_the_calls_width(path: str) -> None:
    """``states/pool.py`` lays them out for it. SGLang's copy of the kernel stands for FlashInfer's."""
    assert set(re.findall(r"flat_idx = (.*i_t.*)", source(path))) == {"i_n * T * HV + i_t * HV + i_hv"}
