"""What a launch decides, from flags, configurations and a machine; what it writes down for the processes it starts."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.plan import ServingPlan
from sglang_dflash.launch.rules import EARLY, LATE
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
    assert plan.widths is not None and plan.widths.widths == (1, 4, 16)
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


@pytest.mark.sglang
def test_everything_is_decided_once_from_files_that_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a hybrid 27B's launch on a GPU, through both of our resolution hooks, with SGLang's own steps left out.

    The processes that are started receive the plan with the pickled arguments and open no configuration.
    """
    pytest.importorskip("sglang")
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dflash import enter
    from sglang_dflash.drafter import checkpoint as reading
    from sglang_dflash.features.payoff import known_causes
    from sglang_dflash.launch import resolution as launch
    from sglang_dflash.launch.plan import decision_of

    for name, value in {
        "this_device": lambda _: GPUS["h200"],
        "check_sglang": lambda: None,
        "resolving_view": lambda args: args,
        "model_config_of": lambda args: args,
        "hybrid_gdn_config": lambda config: config,
        "mambaish_config": lambda config: config,
        "_declare": lambda args, **changes: vars(args).update(changes),
    }.items():
        monkeypatch.setattr(launch, name, value)
    rules, decision = (Mock(wraps=getattr(launch, name)) for name in ("judge", "decide"))
    monkeypatch.setattr(launch, "judge", rules)
    monkeypatch.setattr(launch, "decide", decision)
    opened = Mock(wraps=reading.read_text)
    monkeypatch.setattr(reading, "read_text", opened)
    settings = arguments("--mem-fraction-static", "0.75", "--speculative-adaptive", device="cuda")
    args = SimpleNamespace(**vars(settings.arguments))
    launch.after_model_paths(args, lambda _: None)
    launch.around_speculation(args, lambda _: None)
    assert [call.args[1] for call in rules.call_args_list] == [EARLY, LATE] and decision.call_count == 1
    files = ["/".join(call.args[0].parts[-2:]) for call in opened.call_args_list]
    assert {"target/config.json", "drafter/config.json"} <= set(files) and len(files) == len(set(files))
    assert args.enable_linear_replayssm_spec and args.linear_replayssm_cache_len == 16
    assert args.mamba_full_memory_ratio == settings.mamba_full_memory_ratio and not args.speculative_adaptive
    plan = decision_of(args).plan
    assert plan is not None
    assert (plan.replay, plan.records, plan.block) == (True, 16, 16) and plan.widths is not None

    opened.reset_mock()
    monkeypatch.setattr("sglang.srt.plugins._plugins_loaded", True)  # a plan loads them where it arrives
    received = pickle.loads(pickle.dumps(args))
    monkeypatch.setattr(enter, "import_worker", lambda: int)
    entered = list[object]()
    monkeypatch.setattr(enter, "enter_scheduler", entered.append)
    assert enter.create_worker(id, SpeculativeAlgorithm.DFLASH, received) is int and entered == [plan]
    config = SimpleNamespace(context_len=4096, dtype=None, quantization=None, model_path="target")
    model: Any = SimpleNamespace(model_config=config, req_to_token_pool=SimpleNamespace(size=8))
    assert plan.files.config and known_causes(plan, model, model) == {}
    opened.assert_not_called()
