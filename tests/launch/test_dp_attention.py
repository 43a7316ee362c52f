"""DP attention: its conditions, which are checked before weights load, and what its ranks divide."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import sglang.srt.models

from sglang_dflash.launch.which_worker import LOCAL_EMBEDDING
from tests.support.configs import memory_of

pytestmark = pytest.mark.sglang


MODULES = {
    **{"qwen2": "qwen2", "qwen3": "qwen2", "qwen3_vl": "qwen2", "qwen3_vl_text": "qwen2", "qwen3_moe": "qwen2_moe"},
    **{"qwen3_vl_moe": "qwen2_moe", "qwen3_vl_moe_text": "qwen2_moe", "qwen3_next": "qwen3_next"},
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "qwen3_5"),
}

RULES = ("use_attn_tp_group=is_dp_attention_enabled()", "enable_tp=not is_dp_attention_enabled()")


def test_sglangs_models_embed_within_a_group() -> None:
    """From its source: these models need kernels to be imported on a GPU."""
    assert set(MODULES) == LOCAL_EMBEDDING
    for name in {*MODULES.values(), "llama"}:
        tree = ast.parse((Path(sglang.srt.models.__path__[0]) / f"{name}.py").read_text())
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        [made] = [call for call in calls if call.startswith("VocabParallelEmbedding(")]
        assert any(rule in made for rule in RULES) is not (name == "llama"), name


# --- what ranks divide


def test_ranks_of_a_group_divide_attention_and_all_ranks_the_experts() -> None:
    name = "Qwen3.6-35B-A3B"
    alone, shared, dp = (
        memory_of(name, "--max-running-requests", "32", *flags).sizing
        for flags in ((), ("--tp-size", "4"), ("--tp-size", "4", "--attn-dp-size", "4", "--enable-dp-lm-head"))
    )
    for size in ("target_kv", "draft_kv", "drafter_weights", "scratch"):
        assert getattr(dp, size) == getattr(alone, size)
    assert shared.target_kv < dp.target_kv and dp.max_running == 8
    # Three quarters of the experts are elsewhere, and nothing else is.
    experts = 40 * 256 * 3 * 2048 * 512 * 2
    assert alone.target_weights - dp.target_weights == pytest.approx(experts * 3 / 4, rel=1e-6)
    assert shared.target_weights == alone.target_weights // 4
