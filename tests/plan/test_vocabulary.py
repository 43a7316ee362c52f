"""A drafter's own embedding and LM head: copies of the target's, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.errors import Finding, judge
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pair_rules import WEIGHTS
from sglang_dflash.plan.settings import Settings
from tests.support.trainers import config, tensors_of, write, write_target

FORMS = ["speculators", "speculators-reduced"]
Edit = Callable[[dict[str, Tensor]], object]


def finding(tmp_path: Path, name: str, edit: Edit = lambda tensors: None, *, tied: bool = False) -> Finding:
    tensors = tensors_of(name, write_target(tmp_path / "target", tied=tied))
    edit(tensors)
    folder = write(tmp_path / "drafter", config(name), tensors)
    return vocabulary(folder)


def vocabulary(drafter: Path) -> Finding:
    pair = Pair(ModelFiles(str(drafter.parent / "target")), ModelFiles(str(drafter)))
    return judge("vocabulary", WEIGHTS["drafter's vocabulary"], Settings(), pair)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_copy_of_the_targets_passes(tmp_path: Path, name: str, tied: bool) -> None:
    found = finding(tmp_path, name, tied=tied)
    assert found.level == "ok"
    assert "embed_tokens.weight and lm_head.weight compared" in found.value
    assert f"{512 if name.endswith('reduced') else 1024} tokens" in found.value


def test_a_copy_in_a_wider_dtype_passes(tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].float()

    assert finding(tmp_path, "speculators", widen).level == "ok"


@pytest.mark.parametrize("table", ["embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("name", FORMS)
def test_a_trained_table_is_refused(tmp_path: Path, name: str, table: str) -> None:
    found = finding(tmp_path, name, lambda tensors: tensors[table].mul_(1.01))
    assert found.level == "error"
    assert found.value == f"the drafter's {table} is not the target's"


def test_rows_in_another_order_are_refused(tmp_path: Path) -> None:
    def flip(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()

    found = finding(tmp_path, "speculators-reduced", flip)
    assert found.value == "the drafter's lm_head.weight is not the target's"


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors["d2t"].add_(1),
        lambda tensors: tensors["t2d"].logical_not_(),
        lambda tensors: tensors["t2d"].fill_(True),
    ],
    ids=["shifted", "the other half", "all tokens"],
)
def test_two_maps_that_disagree_are_refused(tmp_path: Path, edit: Edit) -> None:
    found = finding(tmp_path, "speculators-reduced", edit)
    assert found.level == "error" and found.value.startswith("t2d marks")


def test_without_the_targets_weights_there_is_a_doubt(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    folder = write(tmp_path / "drafter", config("speculators"), {"lm_head.weight": torch.zeros(1)})
    assert vocabulary(folder).level == "warn"


def test_a_drafter_that_holds_no_copy_passes(tmp_path: Path) -> None:
    """speculators 0.9.0 saves neither table of a whole vocabulary."""

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    found = finding(tmp_path, "speculators", drop)
    assert found.level == "ok" and found.value == "the target's: the checkpoint holds no copy"
