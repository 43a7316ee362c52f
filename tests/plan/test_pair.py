from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sglang_dflash.errors import DFlashError, Finding, judge, raise_first_error
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pair_rules import CONFIGURATIONS
from sglang_dflash.plan.settings import Settings
from tests.support.configs import MISSING, drafter, pair_of, target

FLAGS = {"block_size": "--speculative-num-draft-tokens", "draft_window": "--speculative-draft-window-size"}


def arguments(**flags: int) -> Any:
    words = [(FLAGS.get(name) or "--" + name.replace("_", "-"), str(value)) for name, value in flags.items()]
    return parse([word for pair in words for word in pair], target="t", drafter="d")[0]


def findings(
    drafter_changes: Mapping[str, Any] | None = None,
    target_changes: Mapping[str, Any] | None = None,
    **flags: int,
) -> dict[str, Finding]:
    pair = pair_of(drafter(**(drafter_changes or {})), target(**(target_changes or {})))
    return check(arguments(**flags), pair)


def check(settings: Settings, pair: Pair) -> dict[str, Finding]:
    return {about: judge(about, rule, settings, pair) for about, rule in CONFIGURATIONS.items()}


def test_a_pair_that_fits_has_only_ok_findings() -> None:
    assert {finding.level for finding in findings(block_size=8, tp_size=2, draft_window=64).values()} == {"ok"}


def test_a_multimodal_target_is_read_through_its_text_config() -> None:
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": target()}
    assert {finding.level for finding in check(arguments(), pair_of(drafter(), nested)).values()} == {"ok"}


ERRORS = [
    ("hidden size", {"hidden_size": 128}, {}, {}, "hidden_size 128 of the drafter, 64 of the target"),
    ("vocabulary", {"vocab_size": 1000}, {}, {}, "vocab_size 1000"),
    ("vocabulary", {}, {"vocab_size": MISSING}, {}, "None of the target"),
    ("target's layers", {"num_target_layers": 9}, {}, {}, "num_target_layers 9"),
    ("target_layer_ids", {"target_layer_ids": [1, 4, 7]}, {}, {}, "7 cannot be captured"),
    ("target_layer_ids", {"target_layer_ids": [1, 40, 6]}, {}, {}, "40 cannot be captured"),
    ("target_layer_ids", {}, {"num_hidden_layers": MISSING}, {}, "num_hidden_layers None"),
    ("mask token", {"mask_token_id": 1024}, {}, {}, "mask_token_id 1024"),
    ("block size", {}, {}, {"block_size": 17}, "block size 17"),
    ("block size", {}, {}, {"block_size": 1}, "block size 1"),
    ("block size", {"block_size": MISSING}, {}, {}, "block_size is missing"),
    ("heads by tensor parallelism", {}, {}, {"tp_size": 3}, "--tp-size 3"),
    ("heads by tensor parallelism", {}, {}, {"tp_size": 8}, "4 heads"),
    ("heads by tensor parallelism", {"intermediate_size": 126}, {}, {"tp_size": 4}, "intermediate_size 126"),
    ("draft window", {}, {}, {"draft_window": 15}, "--speculative-draft-window-size 15"),
]


@pytest.mark.parametrize(("about", "drafter_changes", "target_changes", "serving", "named"), ERRORS)
def test_a_pair_that_does_not_fit_is_an_error_that_says_what_to_do(
    about: str, drafter_changes: Any, target_changes: Any, serving: Any, named: str
) -> None:
    found = findings(drafter_changes, target_changes, **serving)
    assert found[about].level == "error"
    assert named in found[about].value
    assert found[about].expected and found[about].remedy
    with pytest.raises(DFlashError) as raised:
        raise_first_error(found.values())
    first = next(finding for finding in found.values() if finding.level == "error")
    assert Finding.of(first.about, raised.value) == first


WARNINGS = [
    ("target's layers", {"num_target_layers": MISSING}, {}, {}),
    ("mask token", {"mask_token_id": 2}, {}, {}),
    ("context length", {"max_position_embeddings": 2048}, {}, {}),
    ("context length", {}, {}, {"context_length": 8192}),
]


@pytest.mark.parametrize(("about", "drafter_changes", "target_changes", "serving"), WARNINGS)
def test_a_doubtful_pair_is_warned_of_and_still_starts(
    about: str, drafter_changes: Any, target_changes: Any, serving: Any
) -> None:
    found = findings(drafter_changes, target_changes, **serving)
    assert [finding.about for finding in found.values() if finding.level == "warn"] == [about]
    raise_first_error(found.values())


def test_more_ranks_than_kv_heads_share_them() -> None:
    assert findings(tp_size=4)["heads by tensor parallelism"].level == "ok"


def test_a_block_wider_than_the_drafters_is_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*flags: str) -> Finding:
        settings = parse(["--speculative-num-draft-tokens", "32", *flags], target="t", drafter="d")[0]
        return check(settings, pair_of(drafter(), adaptive=settings.speculative_adaptive))["block size"]

    assert found("--speculative-adaptive").value == "32: 16 drafted, the rest copied"
    assert found().level == "error"
    monkeypatch.setenv("SGLANG_DFLASH_COPIES", "0")
    assert found("--speculative-adaptive").level == "error"


def test_the_flag_alone_gives_a_block_size_to_a_drafter_without_one() -> None:
    assert findings({"block_size": MISSING}, block_size=8)["block size"].value == "8"


def test_layers_are_summed_up() -> None:
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048}
    assert findings(mixed)["drafter's layers"].value == "1 causal sliding, 1 full, window 2048"


@pytest.mark.parametrize(
    ("layers", "requested", "said"),
    [
        ("full full", 64, "64 tokens for full-attention layers"),
        ("sliding full", 64, "64 tokens for full-attention layers"),
        ("sliding full", 16, "31 tokens: not 16, because sliding layers keep their window of 32"),
        ("sliding sliding", 64, "31 tokens, as every layer slides"),
    ],
)
def test_the_draft_window_found_is_the_one_served(layers: str, requested: int, said: str) -> None:
    changes = {"layer_types": [f"{kind}_attention" for kind in layers.split()], "sliding_window": 32}
    found = findings(changes, draft_window=requested)["draft window"]
    assert found.level == "ok"
    assert found.value.startswith(said)
