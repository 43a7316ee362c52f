"""What SGLang's parser makes of the published cards' commands, with this package and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cards import NAMES, PLAIN_SGLANG_SAYS, card

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")

SCRIPT = Path(__file__).parent / "parse_commands.py"
WINDOW = ["--speculative-dflash-draft-window-size", "4096"]
CONTRADICTION = ["--mamba-radix-cache-strategy", "no_buffer"]


def parse(mode: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), mode],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    return [card(name).arguments for name in NAMES]


def test_the_commands_do_not_parse_without_this_package(commands: list[list[str]]) -> None:
    outcomes = parse("plain", [*commands, [*commands[0][:2], *WINDOW]])
    reasons = dict(zip([*NAMES, "window"], outcomes, strict=True))
    assert {name: reason["exit"] for name, reason in reasons.items()} == dict.fromkeys(reasons, 2)
    assert "unrecognized arguments: --speculative-dflash-draft-window-size" in reasons.pop("window")["error"]
    for name, reason in reasons.items():
        assert PLAIN_SGLANG_SAYS[name] in reason["error"]


def test_the_commands_and_an_engines_old_keywords_parse_with_this_package(commands: list[list[str]]) -> None:
    *cards, window, contradiction, engine = parse(
        "plugin", [*commands, [*commands[0], *WINDOW], [*commands[0], *CONTRADICTION]]
    )
    for name, parsed in zip(NAMES, cards, strict=True):
        small = name == "Qwen3.5-4B"
        assert parsed == {
            "mamba_radix_cache_strategy": "extra_buffer",
            "speculative_draft_window_size": None,
            "cuda_graph_backend_prefill": "breakable" if small else None,
            "speculative_num_draft_tokens": None if small else 16,
            "speculative_dflash_block_size": 8 if small else None,
            "mem_fraction_static": 0.8 if small else 0.75,
        }
    assert window["speculative_draft_window_size"] == 4096
    assert contradiction["exit"] == 2
    assert "keep only --mamba-radix-cache-strategy" in contradiction["error"]
    assert engine["mamba_radix_cache_strategy"] == "extra_buffer"
    assert (engine["speculative_draft_window_size"], engine["cuda_graph_backend_prefill"]) == (64, "breakable")
