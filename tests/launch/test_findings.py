"""What each rule finds for flags, variables and models: the table ``findings.yaml``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU
from sglang_dflash.launch.launch import Launch
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.launch.commands import models
from tests.support.configs import MISSING, drafter, finding, target

HERE = Path(__file__).parent
AMD = replace(GPUS["h200"], name="AMD Instinct MI300X", capability=None, is_rocm=True)
DEVICES = {**GPUS, "cpu": CPU, "amd": AMD, "unknown": UNKNOWN_GPU}
ALL_MISSING = {"MISSING": MISSING}


def rows() -> Iterator[Any]:
    for about, found in yaml.safe_load((HERE / "findings.yaml").read_text()).items():
        for row in found:
            devices = row.get("device", "h200")
            for device in [devices] if isinstance(devices, str) else devices:
                models = " ".join(str(row[part]) for part in ("target", "drafter", "env") if part in row)
                words = device, about, row["level"], row.get("flags", ""), models
                yield pytest.param(about, row, device, id=" ".join(filter(None, words)))


def launch_of(row: dict[str, Any], device: str) -> Launch:
    """The launch of a row; changed keys are those of a pair without files."""
    named, changed = {"target": str(HERE), "drafter": str(HERE)}, {}
    for part, whole in (("target", target), ("drafter", drafter)):
        model = row.get(part, {})
        if isinstance(model, dict):
            changed[part] = whole(**{key: ALL_MISSING.get(str(value), value) for key, value in model.items()})
        elif model.startswith("tiny"):
            named |= {"target": str(target_path(model)), "drafter": str(drafter_path(model, "good"))}
        else:
            named[part] = str(models() / model)
    settings = parse(shlex.split(row.get("flags", "")), **named)[0]
    launch = Launch.of(replace(settings, environ=row.get("env", {})), DEVICES[device])
    for part, config in changed.items():
        vars(getattr(launch, f"{part}_files")).update(config=config, published=config)
        vars(getattr(launch, f"{part}_files")).update({"tensors": {}} if part == "drafter" else {})
    return replace(launch, **{name: row[name] for name in ("sglangs_hybrid", "other_states") if name in row})


@pytest.mark.parametrize(("about", "row", "device"), rows())
def test_a_launch_has_the_finding(about: str, row: dict[str, Any], device: str) -> None:
    found = finding(about, launch_of(row, device))
    text = f"{found.value}. Fix: {found.remedy}"
    assert found.level == row["level"], text
    assert [each for each in row.get("has", ()) if each not in text] == []
    assert [each for each in row.get("lacks", ()) if each in text] == []
    assert found.value == row.get("value", found.value)
