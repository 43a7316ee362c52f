"""Each rule that compares a drafter with its target: what passes, what is doubtful, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.check.machine import GPUS
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.rules import judge
from sglang_dflash_lab.pairs import target_path
from tests.support.configs import (
    CONFIGURATIONS,
    MISSING,
    RULES,
    drafter,
    finding,
    launch_of,
    settings,
    target,
    write_model,
)
from tests.support.trainers import config, tensors_of, write_target


@pytest.mark.parametrize(
    "target", [target(), {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": target()}]
)
def test_a_pair_that_fits_has_only_ok_findings(target: dict[str, Any]) -> None:
    launch = launch_of(drafter(), target, speculative_num_draft_tokens=8, tp_size=2, speculative_draft_window_size=64)
    assert {finding(about, launch).level for about in CONFIGURATIONS} == {"ok"}


FLOAT16 = "served in float16"


@pytest.mark.parametrize(
    ("about", "level", "said", "drafters", "targets", "given"),
    [
        ("heads by tensor parallelism", "ok", "", {}, {}, {"tp_size": 4}),  # more ranks than KV heads share them
        ("block size", "ok", "", {"block_size": MISSING}, {}, {"speculative_num_draft_tokens": 8}),
        ("context length", "warn", "2048", {"max_position_embeddings": 2048}, {}, {}),
        ("context length", "warn", "8192", {}, {}, {"context_length": 8192}),
        # SGLang serves float32 checkpoints in float16.
        ("dtype", "ok", "", {}, {"dtype": "bfloat16"}, {"dtype": "auto"}),
        ("dtype", "warn", FLOAT16, {}, {"dtype": "float32"}, {"dtype": "auto"}),
        ("dtype", "warn", FLOAT16, {}, {}, {"dtype": "auto"}),
        ("dtype", "ok", "", {}, {"dtype": "float32"}, {"dtype": "float32"}),
        ("dtype", "warn", FLOAT16, {}, {"dtype": "bfloat16"}, {"dtype": "half"}),
    ],
)
def test_a_doubtful_pair_is_a_warning(
    about: str, level: str, said: str, drafters: Any, targets: Any, given: Any
) -> None:
    found = finding(about, launch_of(drafter(**drafters), target(**targets), **given))
    assert found.level == level and said in found.value


@pytest.mark.parametrize(
    ("override", "said", "remedy"),
    [
        ({"vocab_size": 5}, "sets vocab_size to 5", "leave vocab_size out"),
        ({"num_hidden_layers": 2}, "sets num_hidden_layers to 2", "leave num_hidden_layers out"),
        ({"layer_types": None}, "sets layer_types to None", "leave layer_types out"),
        ({"dflash_config": {"block_size": 4}}, "sets dflash_config", "set dflash_config in the drafter's config.json"),
    ],
)
def test_an_override_of_what_the_weights_decide_is_one_error(override: Any, said: str, remedy: str) -> None:
    texts = target(layer_types=["full_attention"] * 12)
    for stated, given in ((texts, override), ({"text_config": texts}, override | {"text_config": override})):
        found = finding("vocabulary", launch_of(drafter(), stated, json_model_override_args=json.dumps(given)))
        assert found.level == "error" and said in found.value and remedy in found.remedy


def test_a_block_wider_than_the_drafters_is_for_copies() -> None:
    wide = {"speculative_num_draft_tokens": 32, "speculative_adaptive": True}
    assert finding("block size", launch_of(drafter(), **wide)).value == "32: 16 drafted, the rest copied"
    assert finding("block size", launch_of(drafter(), speculative_num_draft_tokens=32)).level == "error"


def test_every_error_of_a_rule_is_listed() -> None:
    found = [*judge(launch_of(drafter(target_layer_ids=[1, 6, 7, 40])), {"layers": RULES["target_layer_ids"]})]
    assert [(each.level, each.about) for each in found] == [("error", "layers")] * 2
    assert ["7 is outside 0 to 6" in found[0].value, "40 is outside 0 to 6" in found[1].value] == [True, True]


MASK = "<|MASK|>"
TABLES = ("embed_tokens.weight", "lm_head.weight")


def tokenizer(content: str | None = None, words: dict[str, int] | None = None) -> dict[str, Any]:
    added = [] if content is None else [{"id": 900, "content": content}]
    return {"added_tokens": added, "model": {"vocab": words or {}}}


@pytest.mark.parametrize(
    ("targets", "drafters", "level", "said"),
    [
        (tokenizer(MASK), None, "ok", ""),
        ({**tokenizer(MASK), "version": "1.0"}, tokenizer(MASK), "ok", ""),
        (tokenizer(), tokenizer(MASK), "error", "differs"),
    ],
)
def test_a_drafters_tokenizer_is_the_targets(
    targets: Any, drafters: Any, level: str, said: str, tmp_path: Path
) -> None:
    for name, content in (("target", targets), ("drafter", drafters)):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
    files = {f"{name}_files": ModelFiles(str(tmp_path / name)) for name in ("target", "drafter")}
    found = finding("tokenizer", replace(launch_of(drafter()), **files))
    assert found.level == level and said in found.value


@pytest.mark.parametrize("name", ["speculators", "speculators-reduced"])
def test_a_drafter_with_tables_of_its_own_is_doubtful(name: str, tmp_path: Path) -> None:
    tensors = tensors_of(name, write_target(tmp_path / "target"))
    models = {"model_path": str(tmp_path / "target"), "speculative_draft_model_path": str(tmp_path / "drafter")}
    for level in ("warn", "ok"):  # speculators 0.9.0 saves neither table of a whole vocabulary
        write_model(tmp_path / "drafter", config(name), tensors)
        assert finding("drafter's vocabulary", Launch.of(settings(**models), GPUS["h200"])).level == level
        tensors = {key: tensor for key, tensor in tensors.items() if key not in TABLES}


@pytest.mark.parametrize(
    ("block", "interval", "more", "level"),
    [
        (16, 256, {}, "ok"),
        (128, 256, {}, "ok"),
        (129, 256, {}, "error"),
        (32, 64, {}, "ok"),
        (64, 64, {}, "error"),  # with overlap two steps would write one snapshot: 19 of 22 cached states were wrong
        (64, 64, {"disable_overlap_schedule": True}, "ok"),
        (64, 64, {"page_size": 128}, "ok"),
        (16, 16, {}, "ok"),  # states are computed in chunks of 64 tokens
        (16, 8, {}, "error"),  # SGLang asserts a block
        (300, 256, {"disable_radix_cache": True}, "ok"),
        (300, 256, {"mamba_radix_cache_strategy": "no_buffer"}, "ok"),
    ],
)
def test_no_two_steps_in_flight_write_one_snapshot(block: int, interval: int, more: dict[str, Any], level: str) -> None:
    model = json.loads((target_path("tiny-hybrid") / "config.json").read_text())
    given = {"speculative_num_draft_tokens": block, "mamba_track_interval": interval, **more}
    found = finding("recurrent snapshots", launch_of(drafter(), model, **given))
    assert found.level == level, found
    assert level == "ok" or "set --mamba-track-interval to" in found.remedy
