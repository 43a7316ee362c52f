"""SGLang's and FlashInfer's kernels of the gated delta net: run with ours, and facts of their source."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.states.test_exact import passed

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
    assert "skipped" not in passed("sglang_cases.py", "1")


@pytest.mark.parametrize(
    "path",
    [f"{OPS}/cutedsl_gdn_mtp_ring.py", f"{FLASHINFER}/gdn_decode_mtp.py", f"{FLASHINFER}/gdn_decode_bf16_state.py"],
)
def test_flashinfers_verify_writes_states_by_the_calls_width(path: str) -> None:
    """``worker/start/graphs.py`` lays them out for it. SGLang's copy of the kernel stands for FlashInfer's."""
    assert set(re.findall(r"flat_idx = (.*i_t.*)", source(path))) == {"i_n * T * HV + i_t * HV + i_hv"}


@pytest.mark.parametrize(
    ("path", "beta"),
    [
        (f"{OPS}/fla/fused_recurrent.py", "beta_val = tl.sigmoid(b_val).to(b.dtype.element_ty).to(tl.float32)"),
        (f"{OPS}/linear/fused_gdn_gating.py", "tl.store(beta_output + off, blk_beta_output.to(b.dtype.element_ty)"),
        (f"{OPS}/linear/fused_sigmoid_gating_recurrent.py", "b_beta = 1.0 / (1.0 + tl.exp(-b_b))\n"),
        (f"{FLASHINFER}/gdn_decode_pretranspose.py", "r_beta = 1.0 / (1.0 + cute.exp(-r_b, fastmath=True))\n"),
        (f"{FLASHINFER}/gdn_decode_bf16_state.py", "sGB[(i_t_pre, 1)] = r_beta_pre\n"),
    ],
    ids=["decode rounds", "prefill rounds", "verify does not", "FlashInfer's decode does not", "nor with bf16 states"],
)
def test_who_rounds_beta(path: str, beta: str) -> None:
    """The first two round, the others do not; our verify goes by the decode (``states/replay.py``), and the page on
    bfloat16 says what SGLang's verify does."""
    assert beta in source(path)
