"""Each rule that compares a drafter with its target: what passes, what is doubtful, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.errors import Finding, apply, raise_first_error
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pair_rules import Rule
from sglang_dflash.plan.settings import Settings
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.configs import CONFIGURATIONS, MISSING, TEXT, WEIGHTS, drafter, pair_of, target, write_model
from tests.support.trainers import config, tensors_of, write_target


def check(rules: dict[str, Rule], settings: Settings, pair: Pair) -> dict[str, Finding]:
    return {about: apply(about, rule, settings, pair) for about, rule in rules.items()}


def compared(drafter_changes: Any = None, target_changes: Any = None, **settings: int) -> dict[str, Finding]:
    pair = pair_of(drafter(**(drafter_changes or {})), target(**(target_changes or {})))
    return check(CONFIGURATIONS, Settings(**settings), pair)  # type: ignore[arg-type]


def test_a_pair_that_fits_has_only_ok_findings() -> None:
    settings = {"speculative_num_draft_tokens": 8, "tp_size": 2, "speculative_draft_window_size": 64}
    assert {finding.level for finding in compared(**settings).values()} == {"ok"}
    multimodal = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": target()}
    assert {each.level for each in check(CONFIGURATIONS, Settings(), pair_of(drafter(), multimodal)).values()} == {"ok"}
    assert compared(tp_size=4)["heads by tensor parallelism"].level == "ok"  # more ranks than KV heads share them
    only_flag = compared({"block_size": MISSING}, speculative_num_draft_tokens=8)
    assert only_flag["block size"].value == "8"


@pytest.mark.parametrize(
    ("about", "drafter_changes", "settings"),
    [("context length", {"max_position_embeddings": 2048}, {}), ("context length", {}, {"context_length": 8192})],
)
def test_a_doubtful_pair_is_a_warning_and_still_starts(about: str, drafter_changes: Any, settings: Any) -> None:
    found = compared(drafter_changes, **settings)
    assert [finding.about for finding in found.values() if finding.level == "warn"] == [about]
    raise_first_error(found.values())


def test_a_block_wider_than_the_drafters_is_for_copies() -> None:
    def found(*, adaptive: bool, **settings: Any) -> Finding:
        pair = pair_of(drafter(), adaptive=adaptive)
        return check(CONFIGURATIONS, Settings(speculative_num_draft_tokens=32, **settings), pair)["block size"]

    assert found(adaptive=True).value == "32: 16 drafted, the rest copied"
    assert found(adaptive=False).level == "error"
    assert found(adaptive=True, copies_switch="0").level == "error"


@pytest.mark.parametrize(
    ("stated", "flag", "served"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float32", "auto", "float16"),
        (None, "auto", "float16"),
        ("float32", "float32", "float32"),
        ("bfloat16", "half", "float16"),
    ],
)
def test_the_served_dtype_is_sglangs_and_float16_is_a_warning(stated: str | None, flag: str, served: str) -> None:
    pair, settings = pair_of(drafter(), {"dtype": stated}), Settings(dtype=flag)
    assert pair.served_dtype(settings) == served
    assert check(WEIGHTS, settings, pair)["dtype"].level == ("warn" if served == "float16" else "ok")


MASK = "<|MASK|>"


def tokenizer(content: str | None = None, words: dict[str, int] | None = None) -> dict[str, Any]:
    added = [] if content is None else [{"id": 900, "content": content}]
    return {"added_tokens": added, "model": {"vocab": words or {}}}


@pytest.mark.parametrize(
    ("targets", "drafters", "template", "about", "level", "said"),
    [
        (tokenizer(MASK), None, "{{ messages }}", "mask token's name", "ok", MASK),
        (tokenizer(MASK), None, "{{ messages }}", "tokenizer", "ok", ""),
        (tokenizer(MASK), None, "{{ messages }}", "chat template", "ok", "no thinking switch"),
        (tokenizer(), None, "", "mask token's name", "ok", "unused"),
        (tokenizer("<|im_end|>"), None, "", "mask token's name", "note", "'<|im_end|>', a token that chats"),
        (tokenizer(words={"hello": 900}), None, "", "mask token's name", "warn", "'hello', an ordinary token"),
        ({**tokenizer(MASK), "version": "1.0"}, tokenizer(MASK), "", "tokenizer", "ok", ""),
        (tokenizer(), tokenizer(MASK), "", "tokenizer", "error", "differs"),
        (tokenizer(), None, "", "chat template", "warn", "the target has none"),
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
    pair = Pair(ModelFiles(str(tmp_path / "target")), ModelFiles(str(tmp_path / "drafter")))
    vars(pair).update(drafter=pair_of(drafter()).drafter)
    found = check(TEXT, Settings(), pair)[about]
    assert found.level == level and said in found.value
    assert check(TEXT, Settings(chat_template="t.jinja"), pair)["chat template"].level == "ok"


Edit = Callable[[dict[str, Tensor]], object]
TABLES = ("embed_tokens.weight", "lm_head.weight")


def widen(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].float()


def flip_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()


# Trainer's form, change, level, and what is said: a drafter's own embedding and LM head must be the target's.
VOCABULARIES: list[tuple[str, Edit, str, str]] = [
    ("speculators", lambda tensors: None, "ok", "embed_tokens.weight and lm_head.weight compared"),
    ("speculators-reduced", lambda tensors: None, "ok", "512 tokens"),
    ("speculators", widen, "ok", "1024 tokens"),
    # speculators 0.9.0 saves neither table of a whole vocabulary
    ("speculators", lambda tensors: [tensors.pop(table) for table in TABLES], "ok", "the checkpoint holds no copy"),
    *(
        (name, lambda tensors, table=table: tensors[table].mul_(1.01), "error", f"{table} is not the target's")
        for name in ("speculators", "speculators-reduced")
        for table in TABLES
    ),
    ("speculators-reduced", flip_head, "error", "lm_head.weight is not the target's"),
    ("speculators-reduced", lambda tensors: tensors["d2t"].add_(1), "error", "t2d marks"),
    ("speculators-reduced", lambda tensors: tensors["t2d"].logical_not_(), "error", "t2d marks"),
    ("speculators-reduced", lambda tensors: tensors["t2d"].fill_(True), "error", "t2d marks"),
]


def vocabulary(folder: Path, drafter: Path) -> Finding:
    pair = Pair(ModelFiles(str(folder / "target")), ModelFiles(str(drafter)))
    return apply("vocabulary", WEIGHTS["drafter's vocabulary"], Settings(), pair)


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


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({}, "ok"),  # every 256 tokens, blocks of 16
        ({"speculative_num_draft_tokens": 128}, "ok"),
        ({"speculative_num_draft_tokens": 129}, "error"),
        ({"speculative_num_draft_tokens": 32, "mamba_track_interval": 64}, "ok"),
        # With overlap two steps would write one snapshot: 19 of 22 cached states were wrong.
        ({"speculative_num_draft_tokens": 64, "mamba_track_interval": 64}, "error"),
        ({"speculative_num_draft_tokens": 64, "mamba_track_interval": 64, "disable_overlap_schedule": True}, "ok"),
        ({"speculative_num_draft_tokens": 64, "mamba_track_interval": 64, "page_size": 128}, "ok"),
        ({"mamba_track_interval": 16}, "ok"),  # states are computed in chunks of 64 tokens
        ({"mamba_track_interval": 8}, "error"),  # SGLang asserts a block
        ({"speculative_num_draft_tokens": 300, "disable_radix_cache": True}, "ok"),
        ({"speculative_num_draft_tokens": 300, "mamba_radix_cache_strategy": "no_buffer"}, "ok"),
    ],
)
def test_no_two_steps_in_flight_write_one_snapshot(settings: dict[str, Any], level: str) -> None:
    given = Settings(str(target_path("tiny-hybrid")), str(drafter_path("tiny-hybrid")), **settings)
    found = apply("", CONFIGURATIONS["recurrent snapshots"], given, Pair.of(given))
    assert found.level == level, found
    if level == "error":
        assert "set --mamba-track-interval to" in str(found)
