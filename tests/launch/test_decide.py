"""What a launch decides, from flags, configurations and a machine; what it writes down for the processes it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.plan import ServingPlan
from sglang_dflash.launch.settings import Settings
from tests.support.configs import card_pair, launched, planned


def arguments(*flags: str, **others: Any) -> Settings:
    return parse(flags, **card_pair("Qwen3.5-27B"))[0].changed(**others)


def decided(settings: Settings, *, hybrid: bool) -> ServingPlan:
    return planned(replace(Launch.of(settings, GPUS["h200"]), sglangs_hybrid=hybrid))


@pytest.mark.parametrize(
    ("role", "backup", "hybrid", "overlap"),
    [
        ("decode", None, True, False),
        ("decode", "cpu_tensor", True, False),
        ("decode", "none", True, True),
        ("decode", None, False, True),
        ("prefill", None, True, True),
        ("null", None, True, True),
    ],
)
def test_a_state_never_runs_ahead_of_a_retracted_requests_tokens(
    role: str, backup: str | None, hybrid: bool, overlap: bool
) -> None:
    args = arguments(disaggregation_mode=role, disaggregation_decode_retraction_backup=backup)
    assert decided(args, hybrid=hybrid).overlap == overlap


def test_a_width_file_needs_its_flag_and_fits_the_block(tmp_path: Path) -> None:
    file = tmp_path / "widths.json"
    file.write_text(json.dumps({"widths": [1, 4, 16]}))
    flags = ("--speculative-adaptive-config", str(file))
    with pytest.raises(DFlashError, match="without --speculative-adaptive"):
        decided(arguments(*flags), hybrid=True)
    adaptive = ("--speculative-adaptive", *flags)
    plan = decided(arguments(*adaptive), hybrid=True)
    assert plan.widths == (1, 4, 16)
    with pytest.raises(DFlashError, match="width 16"):
        decided(arguments(*adaptive, "--speculative-num-draft-tokens", "8"), hybrid=True)


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("config", "flags", "block", "served"),
    [
        ({}, (), 16, (1, 2, 4, 8, 12, 16)),
        ({"widths": [1, 4]}, (), 4, (1, 4)),
        ({"widths": [1, 4]}, ("--speculative-num-draft-tokens", "16"), 4, (1, 4)),
        ({"widths": [1, 4]}, ("--speculative-dflash-block-size", "8"), 4, (1, 4)),
        ({"widths": [1]}, (), 2, (1,)),  # SGLang's shortest block
    ],
)
def test_no_graph_is_captured_for_a_width_that_no_step_has(
    config: dict[str, Any],
    flags: tuple[str, ...],
    block: int,
    served: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang captures the block that the launch declares; this package captures the other served widths."""
    pytest.importorskip("sglang")
    file = tmp_path / "widths.json"
    file.write_text(json.dumps(config))
    settings = arguments("--speculative-adaptive", "--speculative-adaptive-config", str(file), *flags)
    plan = decided(settings, hybrid=True)
    assert (plan.block, plan.served_widths) == (block, served)
    declared = launched(settings, GPUS["h200"], monkeypatch)
    assert declared["speculative_num_draft_tokens"] == declared["speculative_dflash_block_size"] == block
