"""The order of runs, resumption, and the servers of the arms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench.arms import AR, FORMS, Arm, check_arm, find_pair, parse_arms
from sglang_dflash_lab.bench.session import Settings, plan

PAIR = find_pair("tiny-hybrid", None, None)
INFO = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16, "internal_states": [{}]}
OURS = {**INFO, "internal_states": [{"sglang_dflash": {}}]}
PLAIN = {"internal_states": [{}]}
LAB = Path(__file__).parents[2] / "lab"
_TABLE = (LAB / "README.md").read_text().partition("### Arms")[2].partition("###")[0]
ARMS_OF_THE_TABLE = re.findall(r"`(\w+)(?::B)?`", " ".join(re.findall(r"^\| (`.*?) \|", _TABLE, re.MULTILINE)))


def test_arms_alternate_within_a_cell_and_their_order_is_reversed_in_every_repeat(tmp_path: Path) -> None:
    settings = Settings(PAIR, parse_arms("ar,dflash:16"), ["math"], [1, 4], 2, 2, tmp_path)
    order = [(cell.mode, cell.concurrency, cell.repeat) for cell in plan(settings)]
    first = [("ar", 1, 0), ("dflash:16", 1, 0), ("ar", 4, 0), ("dflash:16", 4, 0)]
    assert order == [*first, ("dflash:16", 1, 1), ("ar", 1, 1), ("dflash:16", 4, 1), ("ar", 4, 1)]


@pytest.mark.parametrize(
    ("arm", "info", "found"),
    [("dflash:16", INFO, "not our worker"), ("builtin:16", OURS, "our worker"), ("dflash:8", OURS, "block size 16")]
    + [("ar", OURS, "speculative_algorithm DFLASH"), ("adaptive:16", PLAIN, "speculative_algorithm None")],
)
def test_a_server_that_is_not_its_arm_is_refused(arm: str, info: dict[str, Any], found: str) -> None:
    with pytest.raises(DFlashError, match=found):
        check_arm(Arm.parse(arm), info)


def test_the_table_of_arms_has_each_arm_that_the_error_names() -> None:
    named = re.findall(r"(\w+)(?::BLOCK|,)", FORMS)
    assert sorted(named) == sorted(ARMS_OF_THE_TABLE) and AR in named
    for kind in ("ngram:8", "dflash", "ar:8"):
        with pytest.raises(DFlashError, match="is invalid"):
            Arm.parse(kind)
