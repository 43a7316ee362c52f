"""What SGLang's parser makes of the published cards' commands, with this package and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cards import NAMES, PLAIN_SGLANG_SAYS, card
from tests.support.parse_commands import outcomes

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")

WINDOW = ["--speculative-dflash-draft-window-size", "4096"]


@pytest.fixture(scope="module")
def parsed() -> dict[str, Any]:
    """Outcomes of the cards' commands, and of further flags after the first one."""
    commands = [card(name).arguments for name in NAMES]
    plain = [*commands, [*commands[0][:2], *WINDOW]]
    plugins = [*commands, [*commands[0], *WINDOW]]
    return outcomes(plain=plain, plugins=plugins)


def test_the_commands_do_not_parse_without_this_package(parsed: dict[str, Any]) -> None:
    reasons = dict(zip([*NAMES, "window"], parsed["plain"], strict=True))
    assert {name: reason["exit"] for name, reason in reasons.items()} == dict.fromkeys(reasons, 2)
    assert "unrecognized arguments: --speculative-dflash-draft-window-size" in reasons.pop("window")["error"]
    for name, reason in reasons.items():
        assert PLAIN_SGLANG_SAYS[name] in reason["error"]


def test_the_commands_parse_with_this_package(parsed: dict[str, Any]) -> None:
    *cards, window = parsed["plugins"]
    for name, found in zip(NAMES, cards, strict=True):
        small = name == "Qwen3.5-4B"
        assert found == {
            "mamba_radix_cache_strategy": "extra_buffer",
            "speculative_draft_window_size": None,
            "cuda_graph_backend_prefill": "breakable" if small else None,
            "speculative_num_draft_tokens": None if small else 16,
            "speculative_dflash_block_size": 8 if small else None,
            "mem_fraction_static": 0.8 if small else 0.75,
        }
    assert window["speculative_draft_window_size"] == 4096
