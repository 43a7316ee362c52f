"""A drafter gets plain layers, for a quantised target too, unless a flag requests quantised ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError, raise_first_error
from sglang_dflash.launch import told as launch
from sglang_dflash.launch.plan import decide
from sglang_dflash.launch.rules import LATE, judge
from sglang_dflash.upstream import read_record
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
        ((FLAG, "fp8"), QUANTISED, "fp8"),
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
    assert ("SGLang's quantised layers, which are untested here" in caplog.text) == (layers == "fp8")


@pytest.mark.parametrize("flags", [(), (FLAG, "unquant")])
def test_a_quantised_drafter_gets_plain_layers(flags: tuple[str, ...], tmp_path: Path) -> None:
    args = resolved(tmp_path, *flags, drafter=QUANTISED)
    assert args.speculative_draft_model_quantization == "unquant"
    config = json.loads((Path(args.speculative_draft_model_path) / "config.json").read_text())
    assert "quantization_config" not in config
    record = read_record(args)
    assert isinstance(record, launch.Launch)
    plan = decide(record)
    again = decide(launch.Launch.of(record.settings, GPUS["h200"]))  # from the folder that SGLang loads
    assert (plan.files, plan.drafter, plan.files.config) == (again.files, again.drafter, again.files.config)
    assert plan.drafter.stored is not None and plan.drafter.quantization is None


def test_sglangs_worker_never_gets_bytes_in_plain_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_DFLASH", raising=False)
    args = resolved(tmp_path, drafter=QUANTISED)
    record = read_record(args)
    assert isinstance(record, launch.Launch)
    changed = record.changed(device="cuda", enable_watermark=True)
    with pytest.raises(
        DFlashError, match="--enable-watermark is used, and SGLang's own worker does not dequantise"
    ) as raised:
        raise_first_error(judge(changed, LATE))
    assert "SGLANG_DFLASH=builtin" in raised.value.remedy
