"""DP attention: its conditions, which are checked before weights load, and what its ranks divide."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("sglang")

import sglang.srt.models

from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.device import CPU
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.settings import SWITCH
from sglang_dflash.launch.which_worker import LOCAL_EMBEDDING, SKIP_GATHER
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.launch.test_which_worker_serves import builtin_reason
from tests.support.checkpoints import copy_of
from tests.support.configs import memory_of, settings

pytestmark = pytest.mark.sglang

SERVED: dict[str, Any] = {"tp_size": 2, "attn_dp_size": 2, "enable_dp_lm_head": True}


def reason(pair: str, *, on_cpu: bool = False, **changed: Any) -> str | None:
    models = {"model_path": str(target_path(pair)), "speculative_draft_model_path": str(drafter_path(pair, "good"))}
    given = settings(**{**models, **SERVED, **changed})
    return builtin_reason(Launch.of(given, CPU if on_cpu else GPUS["h100"]))


@pytest.mark.parametrize("pair", ["tiny-dense", "tiny-hybrid", "tiny-moe"])
@pytest.mark.parametrize("spelling", [{}, {"attn_dp_size": 1, "dp_size": 2, "enable_dp_attention": True}])
def test_it_is_served(pair: str, spelling: dict[str, Any]) -> None:
    assert reason(pair, **spelling) is None
    with pytest.raises(DFlashError, match="over 2 groups"):
        reason(pair, **spelling, enable_dp_lm_head=False)


@pytest.mark.parametrize("on_cpu", [False, True], ids=["GPU", "CPU"])
@pytest.mark.parametrize(
    ("pair", "changed", "found", "remedy"),
    [
        ("tiny-dense", {"enable_dp_lm_head": False}, "one LM head for all ranks", "add --enable-dp-lm-head"),
        ("tiny-dense", {"attn_cp_size": 2}, "context parallelism", "leave --attn-cp-size out"),
        ("tiny-dense", {"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill", "without DP attention"),
        ("tiny-dense", {"disaggregation_mode": "decode"}, "--disaggregation-mode decode", "without DP attention"),
        ("tiny-hybrid", {"tp_size": 4}, "2 ranks per group, and a tied LM head", "set --attn-dp-size 4"),
        ("tiny-moe", {"tp_size": 4}, "2 ranks per group, and a tied LM head", "set --attn-dp-size 4"),
        ("tiny-dense", {"skip_gather": "1"}, f"{SKIP_GATHER}=1", f"unset {SKIP_GATHER}"),
        ("tiny-dense", {"skip_gather": "True"}, f"{SKIP_GATHER}=True", f"unset {SKIP_GATHER}"),
        ("llama", {}, "a target of the type llama", "without DP attention"),
    ],
)
def test_a_missing_condition_is_named(
    pair: str, changed: dict[str, Any], found: str, remedy: str, on_cpu: bool, tmp_path: Path
) -> None:
    if pair == "llama":
        pair = "tiny-dense"
        changed = {"model_path": str(copy_of(target_path(pair), tmp_path / "llama", {}, model_type="llama"))}
    environment = {SWITCH: "", SKIP_GATHER: changed.get("skip_gather", "0")}
    with patch.dict(os.environ, environment), pytest.raises(DFlashError) as caught:
        reason(pair, on_cpu=on_cpu, **changed)
    assert (
        caught.value.problem.startswith("DP attention over 2 groups of ranks with ") and found in caught.value.problem
    )
    assert remedy in caught.value.remedy
    assert ("SGLANG_DFLASH=builtin" in caught.value.remedy) is not on_cpu


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
