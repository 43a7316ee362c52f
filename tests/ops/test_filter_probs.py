"""The filters of seeded draws on CUDA keep what the definition keeps; torch replaces SGLang's kernels."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash import ops, upstream
from sglang_dflash.ops import reference
from tests.support.probability import top_k_renorm_prob, top_p_renorm_prob

NONE = torch.inf  # the top-p value that SeededSampler passes for "no limit"


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upstream, "top_k_renorm_prob", top_k_renorm_prob, raising=False)
    monkeypatch.setattr(upstream, "top_p_renorm_prob", top_p_renorm_prob, raising=False)
    monkeypatch.setattr(ops, "runs_kernels", lambda tensor: True)
    return ops.filter_probs


def test_the_filters_on_cuda_equal_their_definition(on_cuda) -> None:
    torch.manual_seed(0)
    rows = 120
    probs = torch.softmax(torch.randn(rows, 200) * 3, dim=-1)
    filters = (
        torch.tensor([1, 3, 40, 1 << 30], dtype=torch.int32).repeat(rows // 4),
        torch.tensor([0.3, 0.9, NONE]).repeat(rows // 3),
        torch.tensor([0.0, 0.05, 0.4, 0.0, 0.9]).repeat(rows // 5),
    )
    assert torch.equal(on_cuda(probs, *filters), reference.filter_probs(probs, *filters))
