"""What a launch decides, from flags, configurations and a machine; what it writes down for the processes it starts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.decide import decide, resolved
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import GPUS
from tests.support.cards import FOLDER

PAIR = {"target": str(FOLDER / "Qwen3.5-27B" / "target"), "drafter": str(FOLDER / "Qwen3.5-27B" / "drafter")}


def arguments(*flags: str, **others: Any) -> Any:
    args = parse(flags, **PAIR)[0]
    vars(args).update(others)
    return args


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
    assert decide(args, GPUS["h200"], hybrid=hybrid).overlap == overlap


def test_a_width_file_needs_its_flag_and_fits_the_block(tmp_path: Path) -> None:
    file = tmp_path / "widths.json"
    file.write_text(json.dumps({"widths": [1, 4, 16]}))
    flags = ("--speculative-adaptive-config", str(file))
    with pytest.raises(DFlashError, match="without --speculative-adaptive"):
        decide(arguments(*flags), GPUS["h200"], hybrid=True)
    adaptive = ("--speculative-adaptive", *flags)
    plan = decide(arguments(*adaptive), GPUS["h200"], hybrid=True)
    assert plan.widths is not None and plan.widths.widths == (1, 4, 16)
    with pytest.raises(DFlashError, match="width 16"):
        decide(arguments(*adaptive, "--speculative-num-draft-tokens", "8"), GPUS["h200"], hybrid=True)


def test_a_target_of_unknown_size_is_planned_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dflash.plan.memory.is_known", lambda _: False)
    plan = decide(arguments(), GPUS["h200"], hybrid=True)
    assert plan.memory is None and "no sizes are known" in str(plan.unsized)
    assert not plan.replay


@pytest.mark.sglang
class TestLaunch:
    """A hybrid 27B's launch on a GPU, through both of our resolution hooks, with SGLang's own steps left out."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
        pytest.importorskip("sglang")
        from sglang_dflash.hooks import launch
        from sglang_dflash.plan import decide as deciding

        counted: Counter[str] = Counter()

        def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **options: counted.update([name]) or function(*args, **options)

        for module, name in (
            (launch, "check_rules"), (launch, "decide"), (deciding, "expected_memory"), (launch, "find_gpu"),
        ):  # fmt: skip
            found = (lambda _: GPUS["h200"]) if name == "find_gpu" else getattr(module, name)
            monkeypatch.setattr(module, name, counting(name, found))
        for name, value in {
            "on_our_cpu_platform": lambda: False,
            "check_sglang": lambda machine: None,
            "resolving_view": lambda args: args,
            "model_config_of": lambda args: args,
            "hybrid_gdn_config": lambda config: config,
            "_declare": lambda args, **changes: vars(args).update(changes),
        }.items():
            monkeypatch.setattr(launch, name, value)
        launch.this_machine.cache_clear()
        yield counted
        launch.this_machine.cache_clear()

    def test_everything_is_decided_once_and_read_back(
        self, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sglang_dflash.hooks import launch

        monkeypatch.delenv("SGLANG_DFLASH_STATE_REPLAY", raising=False)
        one = {"attn_dp_size": 1, "attn_cp_size": 1, "enable_watermark": False}
        exact = {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}
        args = arguments("--mem-fraction-static", "0.75", "--speculative-adaptive", device="cuda", **one, **exact)
        given = SimpleNamespace(**vars(args))
        launch.after_model_paths(args, lambda _: None)
        launch.around_speculation(args, lambda _: None)
        assert calls == {"check_rules": 1, "decide": 1, "expected_memory": 1, "find_gpu": 1}
        assert args.enable_linear_replayssm_spec and args.linear_replayssm_cache_len == 16
        assert args.mamba_full_memory_ratio > 0.9 and not args.speculative_adaptive
        plan = resolved(args, given)
        assert calls["expected_memory"] == 1
        assert (plan.replay, plan.records, plan.block) == (True, 16, 16) and plan.widths is not None
