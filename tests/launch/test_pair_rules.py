"""Each rule that compares a drafter with its target: what passes, what is doubtful, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.check.machine import GPUS
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.errors import Finding
from sglang_dflash.launch.asked import Launch
from sglang_dflash.launch.settings import COPIES_SWITCH
from sglang_dflash_lab.pairs import target_path
from tests.support.configs import CONFIGURATIONS, MISSING, drafter, finding, launch_of, settings, target, write_model
from tests.support.trainers import config, tensors_of, write_target


@pytest.mark.parametrize(
    "target", [target(), {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": target()}]
)
def test_a_pair_that_fits_has_only_ok_findings(target: dict[str, Any]) -> None:
    launch = launch_of(drafter(), target, speculative_num_draft_tokens=8, tp_size=2, speculative_draft_window_size=64)
    assert {finding(about, launch).level for about in CONFIGURATIONS} == {"ok"}


LONGER = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
FLOAT16 = "served in float16"


@pytest.mark.parametrize(
    ("about", "level", "said", "drafters", "targets", "given"),
    [
        ("heads by tensor parallelism", "ok", "", {}, {}, {"tp_size": 4}),  # more ranks than KV heads share them
        ("block size", "ok", "", {"block_size": MISSING}, {}, {"speculative_num_draft_tokens": 8}),
        ("context length", "warn", "2048", {"max_position_embeddings": 2048}, {}, {}),
        (
            "context length",
            "warn",
            "8192",
            {},
            {},
            {"context_length": 8192, "environ": LONGER},
        ),
        ("context length", "error", "exceeds the target's 4096", {}, {}, {"context_length": 8192}),
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
    assert finding("block size", launch_of(drafter(), environ={COPIES_SWITCH: "0"}, **wide)).level == "error"


MASK = "<|MASK|>"


def tokenizer(content: str | None = None, words: dict[str, int] | None = None) -> dict[str, Any]:
    added = [] if content is None else [{"id": 900, "content": content}]
    return {"added_tokens": added, "model": {"vocab": words or {}}}


@pytest.mark.parametrize(
    ("targets", "drafters", "template", "about", "level", "said"),
    [
        (tokenizer(MASK), None, "{{ messages }}", "mask token's name", "ok", ""),
        (tokenizer(MASK), None, "{{ messages }}", "tokenizer", "ok", ""),
        (tokenizer(MASK), None, "{{ messages }}", "chat template", "ok", ""),
        (tokenizer(), None, "", "mask token's name", "ok", ""),
        (tokenizer("<|im_end|>"), None, "", "mask token's name", "note", "'<|im_end|>', a token that chats"),
        (tokenizer(words={"hello": 900}), None, "", "mask token's name", "warn", "'hello', an ordinary token"),
        ({**tokenizer(MASK), "version": "1.0"}, tokenizer(MASK), "", "tokenizer", "ok", ""),
        (tokenizer(), tokenizer(MASK), "", "tokenizer", "error", "differs"),
        (tokenizer(), None, "", "chat template", "warn", "the target has no chat template"),
        (tokenizer(), None, "{% if enable_thinking %}", "chat template", "ok", "has a thinking switch"),
    ],
)
def test_tokenizer_mask_token_and_chat_template(
    targets: Any, drafters: Any, template: str, about: str, level: str, said: str, tmp_path: Path
) -> None:
    for name, content in (("target", targets), ("drafter", drafters)):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
    if template:
        (tmp_path / "target" / "chat_template.jinja").write_text(template)
    launch = replace(
        launch_of(drafter()),
        target_files=ModelFiles(str(tmp_path / "target")),
        drafter_files=ModelFiles(str(tmp_path / "drafter")),
    )
    vars(launch).update(drafter=launch_of(drafter()).drafter)
    found = finding(about, launch)
    assert found.level == level and said in found.value
    assert finding("chat template", launch.changed(chat_template="t.jinja")).level == "ok"


Edit = Callable[[dict[str, Tensor]], object]
TABLES = (_, HEAD) = ("embed_tokens.weight", "lm_head.weight")


# Trainer's form, change, level, and what is said: a drafter's own embedding and LM head must be the target's.
VOCABULARIES: list[tuple[str, Edit, str, str]] = [
    ("speculators", lambda tensors: None, "ok", ""),
    ("speculators-reduced", lambda tensors: None, "ok", ""),
    ("speculators", lambda tensors: tensors.update({TABLES[0]: tensors[TABLES[0]].float()}), "ok", ""),
    # speculators 0.9.0 saves neither table of a whole vocabulary
    ("speculators", lambda tensors: [tensors.pop(table) for table in TABLES], "ok", ""),
    *(
        (name, lambda tensors, table=table: tensors[table].mul_(1.01), "error", f"{table} differs from the target's")
        for name in ("speculators", "speculators-reduced")
        for table in TABLES
    ),
    ("speculators-reduced", lambda tensors: tensors[HEAD].copy_(tensors[HEAD].flip(0)), "error", f"{HEAD} differs"),
    ("speculators-reduced", lambda tensors: tensors["d2t"].add_(1), "error", "t2d marks"),
    ("speculators-reduced", lambda tensors: tensors["t2d"].logical_not_(), "error", "t2d marks"),
    ("speculators-reduced", lambda tensors: tensors["t2d"].fill_(True), "error", "t2d marks"),
]


def vocabulary(folder: Path, drafter: Path) -> Finding:
    models = {"model_path": str(folder / "target"), "speculative_draft_model_path": str(drafter)}
    return finding("drafter's vocabulary", Launch.of(settings(**models), GPUS["h200"]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "edit", "level", "said"), VOCABULARIES)
def test_a_drafters_vocabulary_is_the_targets(
    name: str, edit: Edit, level: str, said: str, tied: bool, tmp_path: Path
) -> None:
    tensors = tensors_of(name, write_target(tmp_path / "target", tied=tied))
    edit(tensors)
    found = vocabulary(tmp_path, write_model(tmp_path / "drafter", config(name), tensors))
    assert found.level == level and said in found.value, found


def test_without_the_targets_weights_the_vocabulary_is_doubtful(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    folder = write_model(tmp_path / "drafter", config("speculators"), {"lm_head.weight": torch.zeros(1)})
    assert vocabulary(tmp_path, folder).level == "warn"


MAMBA = {"hybrid_override_pattern": "M-M*M-M*", "chunk_size": 64}


@pytest.mark.parametrize(
    "model", [json.loads((target_path("tiny-hybrid") / "config.json").read_text()), target(**MAMBA)]
)
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
def test_no_two_steps_in_flight_write_one_snapshot(
    block: int, interval: int, more: dict[str, Any], level: str, model: dict[str, Any]
) -> None:
    given = {"speculative_num_draft_tokens": block, "mamba_track_interval": interval, **more}
    found = finding("recurrent snapshots", launch_of(drafter(), model, **given))
    assert found.level == level, found
    assert level == "ok" or "set --mamba-track-interval to" in found.remedy
