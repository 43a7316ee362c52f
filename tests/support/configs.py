"""Configurations that fit together, for tests to break one key, and a plan that serves them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.check.pools import Pools
from sglang_dflash.check.report import Report, preflight
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import Finding
from sglang_dflash.launch.device import Device
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.pair_rules import DRAFTER_RULES
from sglang_dflash.launch.plan import Decision, ServingPlan, current, decide
from sglang_dflash.launch.rules import EARLY, LATE, judge
from sglang_dflash.launch.settings import Settings
from tests.support.cards import FOLDER
from tests.support.files import raise_first_error

_SHARED: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
TARGET = {**_SHARED, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 8, "eos_token_id": 2}
DRAFTER: dict[str, Any] = {
    **_SHARED,
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 900, "target_layer_ids": [1, 4, 6]},
    "num_target_layers": 8,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MISSING = object()
RULES = EARLY | LATE
_ABOUT = [*DRAFTER_RULES]  # by what they read
CONFIGURATIONS, WEIGHTS, TEXT = (
    {about: RULES[about] for about in each} for each in (_ABOUT[:10], _ABOUT[10:14], _ABOUT[14:])
)


def settings(environ: Mapping[str, str] = os.environ, **changes: Any) -> Settings:
    """Return SGLang's default arguments with changes."""
    return Settings(parse([], target="t", drafter="d")[0].arguments, environ, changes)


def drafter(**changes: Any) -> dict[str, Any]:
    return _changed(DRAFTER, changes)


def target(**changes: Any) -> dict[str, Any]:
    return _changed(TARGET, changes)


def write_model(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Path:
    """Write a model's folder: its configuration, and its tensors if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def launch_of(
    drafter: dict[str, Any], target: dict[str, Any] = TARGET, device: Device = GPUS["h200"], **changes: Any
) -> Launch:
    """A launch of these configurations, without files."""
    folder = str(Path(__file__).parent)  # without models
    launch = Launch(settings(**changes), device, ModelFiles(folder), ModelFiles(folder))
    for files, config in ((launch.target_files, target), (launch.drafter_files, drafter)):
        vars(files).update(config=config, published=config)
    vars(launch.drafter_files).update(tensors={})
    return launch


def finding(about: str, launch: Launch) -> Finding:
    """The first finding of a rule."""
    return next(judge(launch, {about: RULES[about]}))


def planned(launch: Launch) -> ServingPlan:
    """The plan of a launch; its first error is raised."""
    raise_first_error(judge(launch, LATE))
    return decide(launch)


def _changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(base)
    for key, value in changes.items():
        nested = config.get("dflash_config", {})
        place = nested if key in nested else config
        if value is MISSING:
            del place[key]
        else:
            place[key] = value
    return config


def serving_plan(**changes: Any) -> ServingPlan:
    """Return a plan with a fixed block of 8, no draft window and no recurrent states."""
    plan: dict[str, Any] = {"files": ModelFiles("drafter"), "drafter": DrafterConfig.from_dict(DRAFTER), "block": 8}
    plan |= {"widths": None, "window": None, "replay": False, "records": 0}
    plan |= {"copies": False, "overlap": True, "role": "null"}
    return ServingPlan(**{**plan, **changes})


def serve(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Make our worker serve :func:`serving_plan` in this process."""
    monkeypatch.setattr(current, "worker", SimpleNamespace(plan=serving_plan(**changes)), raising=False)


def launched(settings: Settings, device: Device, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the launch of a hybrid target declares to SGLang."""
    from sglang_dflash.launch import resolution

    written: dict[str, Any] = {}
    for name, value in {
        "decision_of": lambda _: Decision(launch=Launch.of(settings, device)),
        "attach_decision": lambda *_: None,
        "model_config_of": lambda _: None,
        "hybrid_gdn_config": lambda _: 1,
        "mambaish_config": lambda _: 1,
        "_declare": lambda _, **changes: written.update(changes),
    }.items():
        monkeypatch.setattr(resolution, name, value)
    resolution.around_speculation(None, lambda _: None)  # type: ignore[arg-type]
    return written


def card_pair(name: str) -> dict[str, str]:
    """A published pair's configurations, without weights."""
    return {model: str(FOLDER / name / model) for model in ("target", "drafter")}


def checked(name: str, *flags: str, on: Device = GPUS["h200"]) -> Report:
    """What ``check`` reports of a published pair with these flags."""
    return preflight(parse(flags, **card_pair(name))[0], on)


def memory_of(name: str, *flags: str, on: Device = GPUS["h200"]) -> Pools:
    memory = checked(name, *flags, on=on).memory
    assert memory is not None
    return memory
