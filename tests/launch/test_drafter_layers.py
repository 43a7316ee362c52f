"""A drafter gets the layers that its own config.json declares, whatever the target's are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.drafter.checkpoint import ModelFiles, plain_view
from sglang_dflash.launch import resolution as launch
from sglang_dflash.launch.plan import decide, decision_of
from tests.support import trainers
from tests.support.cards import FOLDER
from tests.support.configs import write_model

pytestmark = pytest.mark.sglang

CARD = FOLDER / "Qwen3.5-27B"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUANTISED = {"quantization_config": FP8}
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


def resolved(tmp_path: Path, *flags: str, drafter: dict[str, Any]) -> Any:
    """The arguments after the hook, for an FP8 target."""
    target = folder(tmp_path / "target", "target", quantization_config=FP8)
    settings, *_ = parse(flags, target=str(target), drafter=str(folder(tmp_path / "drafter", "drafter", **drafter)))
    args = SimpleNamespace(**vars(settings.arguments))
    launch.after_model_paths(args, lambda _: None)
    return args


@pytest.mark.parametrize(
    ("flags", "drafter", "layers"),
    [
        ((), {}, "unquant"),
        (("--quantization", "fp8"), {}, "unquant"),  # SGLang would hand it on
        ((FLAG, "fp8"), {}, "fp8"),
        ((), {**QUANTISED, "architectures": ["LiLiCorrDraftModel"]}, None),
    ],
    ids=["plain, FP8 target", "plain, flag for the target", "flag for the drafter", "left to SGLang's worker"],
)
def test_a_drafter_is_loaded_from_its_folder(
    flags: tuple[str, ...],
    drafter: dict[str, Any],
    layers: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = resolved(tmp_path, *flags, drafter=drafter)
    assert args.speculative_draft_model_quantization == layers
    assert args.speculative_draft_model_path == str(tmp_path / "drafter")
    assert ("quantises a plain drafter when it is loaded" in caplog.text) == (layers == "fp8")


@pytest.mark.parametrize("flags", [(), (FLAG, "unquant")])
def test_a_quantised_drafter_gets_its_own_quantised_layers(flags: tuple[str, ...], tmp_path: Path) -> None:
    """``unquant`` keeps the target's flag away, and SGLang reads the drafter's config.json."""
    args = resolved(tmp_path, "--quantization", "w8a8_fp8", *flags, drafter=QUANTISED)
    assert args.speculative_draft_model_quantization == "unquant"
    assert args.speculative_draft_model_path == str(tmp_path / "drafter")
    record = decision_of(args).launch
    assert record is not None and decide(record).drafter.quantization == "fp8"
    # SGLang turns the word into None, and keeps that it was set.
    config = ModelConfig(args.speculative_draft_model_path, is_draft_model=True, is_draft_quantization_explicit=True)
    assert config.quantization == "fp8"


def test_a_trainers_form_keeps_its_quantisation(tmp_path: Path) -> None:
    written = {**trainers.config("speculators"), **QUANTISED}
    view = plain_view(ModelFiles(str(write_model(tmp_path / "drafter", written, {"a": torch.zeros(1)}))))
    assert view is not None and json.loads((view / "config.json").read_text())["quantization_config"] == FP8
