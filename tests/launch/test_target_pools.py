"""The pools of every kind of target: predicted, next to SGLang's own formulas for the published configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.check.memory import sizing_of
from sglang_dflash.check.pools import Pools, Sizing, fit
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.plan import decide
from tests.launch.commands import FOLDER

pytestmark = pytest.mark.sglang
FREE = 40 << 30
BLOCK, PAGE, DRAFT = 8, 16, 20_480  # DRAFT: bytes per token of the drafter's K/V
TWO_POOLS = ("gpt-oss-20b", "gpt-oss-120b", "gemma4-31b")
ONE_POOL = ("glm47-flash", "kimi-k26-nvfp4", "minimax-m25")
FLAGS: list[dict[str, Any]] = [
    {},
    {"swa_full_tokens_ratio": 0.3},
    {"max_total_tokens": 70_001},
    {"disable_radix_cache": True, "chunked_prefill_size": 2048, "max_running_requests": 12},
]


# Resolving arguments would load plugins; the CPU platform's replace SGLang's kernels in this process.
@patch("sglang.srt.plugins.load_plugins", lambda: None)
def sglangs(folder: Path, tp: int, **fields: Any) -> Any:
    """SGLang's division of ``FREE`` bytes between K/V pools."""
    spec = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": BLOCK, "page_size": PAGE}
    ranks = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp)
    with get_context().override_server_args(**spec, **fields), get_parallel().override(**ranks):
        model = ModelConfig(str(folder))
        layers = model.num_hidden_layers
        info = SimpleNamespace(start_layer=0, end_layer=layers, num_effective_layers=layers)
        info.full_attention_layer_ids = model.full_attention_layer_ids
        info.swa_attention_layer_ids = model.swa_attention_layer_ids
        configurator: Any = SimpleNamespace(
            kv_cache_dtype_str="auto", kv_cache_dtype=torch.bfloat16, model_config=model, layer_info=info, pp_size=1,
            sliding_window_size=(getattr(model.hf_text_config, "sliding_window", None) or 0) - 1,
            page_size=PAGE, attn_dp_size=1,
            is_draft_worker=False, spec_algorithm=SpeculativeAlgorithm.DFLASH, dflash_draft_cell_size_per_token=DRAFT,
            fused_entry_bytes=lambda kind: None, spec_aux_config=SimpleNamespace(dflash_draft_num_layers=5),
            use_mla_backend=model.attention_arch.name == "MLA", is_hybrid_swa=model.is_hybrid_swa,
            server_args=SimpleNamespace(enable_hisparse=False, enable_dsa_cache_layer_split=False),
        )  # fmt: skip
        pools = create_memory_pool_configurator(configurator)
        found = pools.calculate_pool_sizes(FREE, PAGE)
        if (most := fields.get("max_total_tokens")) and most < found.max_total_num_tokens:
            found = pools.calculate_pool_sizes_from_max_tokens(most, PAGE)
    return found


def predicted(folder: Path, tp: int, **fields: Any) -> tuple[Sizing, Pools]:
    flags = {"page_size": PAGE, "speculative_num_draft_tokens": BLOCK, "tp_size": tp, "kv_cache_dtype": "bf16"}
    settings = parse([], target=str(folder), drafter="")[0].changed(**flags, **fields)
    launch = Launch.of(settings.changed(speculative_draft_model_path=""), GPUS["h200"])
    sizing = replace(sizing_of(launch, decide(launch)), draft_kv=DRAFT, target_weights=0, drafter_weights=0)
    return sizing, fit(sizing, FREE)


@pytest.mark.parametrize("tp", [1, 2, 16])
@pytest.mark.parametrize(
    ("name", "fields"), [*((name, {}) for name in ONE_POOL), *((name, flags) for name in TWO_POOLS for flags in FLAGS)]
)
def test_the_pools_of_a_published_target_are_sglangs(
    name: str, tp: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    config = json.loads((FOLDER / name / "config.json").read_text())
    config.pop("quantization_config", None)  # whose method SGLang knows on a GPU only; it changes no K/V in bf16
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = sglangs(tmp_path, tp, **fields)
    sizing, ours = predicted(tmp_path, tp, **fields)
    assert (ours.tokens, ours.sliding_tokens) == (theirs.max_total_num_tokens, theirs.swa_max_total_num_tokens or 0)
    assert sizing.state == 0
