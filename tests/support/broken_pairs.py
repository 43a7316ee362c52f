"""Pairs and flags that cannot work, each broken in one place (``broken_pairs.yaml``), and a pair that fits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import expected_shapes
from tests.support.configs import MISSING, drafter, target, write_model


@dataclass(frozen=True)
class Broken:
    """One fault: changed keys, extra server flags, or changed files.

    Attributes:
        name: of the fault.
        names: words that its error must contain.
        files: text by path; None removes the file.
        tensors: shapes of the drafter's that differ; None drops one.
    """

    name: str
    names: str
    drafter: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    files: dict[str, str | None] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...] | None] = field(default_factory=dict)


def write_pair(folder: Path, broken: Broken) -> None:
    """Write ``folder/target`` and ``folder/drafter``: configurations, and the drafter's tensors as zeros."""
    for part, config in (("target", target(**broken.target)), ("drafter", drafter(**broken.drafter))):
        write_model(folder / part, config)
    shapes = {**expected_shapes(DrafterConfig.from_dict(drafter())), **broken.tensors}
    write_tensors(folder / "drafter", {name: shape for name, shape in shapes.items() if shape is not None})
    index = {"metadata": {"total_size": 1_966_336}, "weight_map": {}}
    (folder / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, text in broken.files.items():
        if text is None:
            (folder / file).unlink()
        else:
            (folder / file).write_text(text)


def write_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of float32 zeros."""
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


def _missing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _missing(each) for key, each in value.items()}
    return MISSING if value == "MISSING" else value


BROKEN = [
    Broken(**{**_missing(row), "flags": tuple(row.get("flags", "").split())})
    for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
]
