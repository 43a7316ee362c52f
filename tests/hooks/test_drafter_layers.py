"""A drafter gets plain layers, for a quantised target too, unless a flag requests quantised ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError
from sglang_dflash.hooks import launch
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.plan import decide, reason_for_builtin
from sglang_dflash.plan.settings import Settings
from sglang_dflash.upstream import read_record
from tests.support.cards import FOLDER
from tests.support.configs import write_model

pytestmark = pytest.mark.sglang

CARD = FOLDER / "Qwen3.5-27B"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLAG = "--speculative-draft-model-quantization"


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "resolving_view", lambda args: args)
    monkeypatch.setattr(launch, "this_device", lambda _: GPUS["h200"])
    monkeypatch.setattr(launch, "declare_resolution", lambda args, _, **changes: vars(args).update(changes))
    monkeypatch.setattr(launch, "check_sglang", lambda: None)


def folder(path: Path, card: str, **changes: Any) -> Path:
    return write_model(path, {**json.loads((CARD / card / "config.json").read_text()), **changes})


def resolved(tmp_path: Path, *flags: str, drafter: dict[str, Any], **others: Any) -> Any:
    """The arguments after the hook, for an FP8 target."""
    target = folder(tmp_path / "target", "target", quantization_config=FP8)
    settings, *_ = parse(flags, target=str(target), drafter=str(folder(tmp_path / "drafter", "drafter", **drafter)))
    args = SimpleNamespace(**{**asdict(settings), "speculative_algorithm": "DFLASH", **others})
    launch.after_model_paths(args, lambda _: None)
    return args


@pytest.mark.parametrize("asked", [None, "fp8"])
def test_a_plain_drafter_stays_plain_with_an_fp8_target(asked: str | None, tmp_path: Path) -> None:
    """SGLang would hand the target's ``--quantization`` on."""
    args = resolved(tmp_path, drafter={}, quantization=asked)
    assert args.speculative_draft_model_quantization == "unquant"
    assert args.speculative_draft_model_path == str(tmp_path / "drafter")


@pytest.mark.parametrize("flags", [(), (FLAG, "unquant")])
def test_a_quantised_drafter_gets_plain_layers(flags: tuple[str, ...], tmp_path: Path) -> None:
    args = resolved(tmp_path, *flags, drafter={"quantization_config": FP8})
    assert args.speculative_draft_model_quantization == "unquant"
    config = json.loads((Path(args.speculative_draft_model_path) / "config.json").read_text())
    assert "quantization_config" not in config
    settings, pair = Settings.of(args), read_record(args)
    assert isinstance(pair, Pair)
    plan = decide(settings, pair, GPUS["h200"], hybrid=True)
    again = decide(settings, Pair.of(settings), GPUS["h200"], hybrid=True)  # from the folder that SGLang loads
    assert (plan.files, plan.drafter, plan.files.config) == (again.files, again.drafter, again.files.config)
    assert plan.drafter.stored is not None and plan.drafter.quantization is None


def test_a_flag_selects_sglangs_quantised_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = resolved(tmp_path, FLAG, "fp8", drafter={"quantization_config": FP8})
    assert args.speculative_draft_model_quantization == "fp8"
    assert args.speculative_draft_model_path == str(tmp_path / "drafter")
    assert "SGLang's quantised layers, which are untested here" in caplog.text


def test_a_drafter_that_is_left_to_sglangs_worker_is_left_as_it_is(tmp_path: Path) -> None:
    args = resolved(tmp_path, drafter={"quantization_config": FP8, "architectures": ["LiLiCorrDraftModel"]})
    assert args.speculative_draft_model_quantization is None
    assert args.speculative_draft_model_path == str(tmp_path / "drafter")


def test_sglangs_worker_never_gets_bytes_in_plain_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_DFLASH", raising=False)
    args = resolved(tmp_path, drafter={"quantization_config": FP8})
    settings, pair = replace(Settings.of(args), device="cuda", enable_watermark=True), read_record(args)
    assert isinstance(pair, Pair)
    with pytest.raises(DFlashError, match="--enable-watermark is used, with a quantised drafter") as raised:
        reason_for_builtin(settings, pair, GPUS["h200"])
    assert "SGLANG_DFLASH=builtin" in raised.value.remedy
