"""Each rule that compares a drafter with its target: what passes, what is doubtful, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.check.machine import GPUS
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.rules import judge
from tests.support.configs import CONFIGURATIONS, RULES, drafter, finding, launch_of, settings, target, write_model
from tests.support.trainers import config, tensors_of, write_target


@pytest.mark.parametrize(
    "target", [target(), {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": target()}]
)
def test_a_pair_that_fits_has_only_ok_findings(target: dict[str, Any]) -> None:
    launch = launch_of(drafter(), target, speculative_num_draft_tokens=8, tp_size=2, speculative_draft_window_size=64)
    assert {finding(about, launch).level for about in CONFIGURATIONS} == {"ok"}


def test_every_error_of_a_rule_is_listed() -> None:
    found = [*judge(launch_of(drafter(target_layer_ids=[1, 6, 7, 40])), {"layers": RULES["target_layer_ids"]})]
    assert [(each.level, each.about) for each in found] == [("error", "layers")] * 2
    assert ["7 is outside 0 to 6" in found[0].value, "40 is outside 0 to 6" in found[1].value] == [True, True]


TABLES = ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("name", ["speculators", "speculators-reduced"])
def test_a_drafter_with_tables_of_its_own_is_doubtful(name: str, tmp_path: Path) -> None:
    tensors = tensors_of(name, write_target(tmp_path / "target"))
    models = {"model_path": str(tmp_path / "target"), "speculative_draft_model_path": str(tmp_path / "drafter")}
    for level in ("warn", "ok"):  # speculators 0.9.0 saves neither table of a whole vocabulary
        write_model(tmp_path / "drafter", config(name), tensors)
        assert finding("drafter's vocabulary", Launch.of(settings(**models), GPUS["h200"])).level == level
        tensors = {key: tensor for key, tensor in tensors.items() if key not in TABLES}
