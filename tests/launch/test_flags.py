"""Old flags, alone and in the cards' commands, as SGLang's parser reads them with this package."""

from __future__ import annotations

import pytest

from sglang_dflash.launch.old_flags import explain_environment, modernise_argv
from tests.support.cards import NAMES, card
from tests.support.parse_commands import FIELDS, outcomes

CHANGES = [
    (["--mamba-scheduler-strategy", "extra_buffer"], ["--mamba-radix-cache-strategy", "extra_buffer"]),
    (["--speculative-dflash-draft-window-size", "4096"], ["--speculative-draft-window-size", "4096"]),
    (["--cuda-graph-max-bs", "8"], ["--cuda-graph-max-bs-decode", "8"]),
    (["--cuda-graph-bs", "8"], ["--cuda-graph-bs-decode", "8"]),
    (["--cuda-graph-backend-prefill", "tc_piecewise"], ["--cuda-graph-backend-prefill", "breakable"]),
    (["--cuda-graph-backend-decode", "tc_piecewise"], ["--cuda-graph-backend-decode", "breakable"]),
]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_an_old_flag_becomes_todays_and_is_told(old: list[str], new: list[str], joined: bool) -> None:
    argv, notes = modernise_argv(["=".join(old), "--tp-size", "2"] if joined else [*old, "--tp-size", "2"])
    assert argv == [*(["=".join(new)] if joined else new), "--tp-size", "2"]
    [note] = notes
    assert " is now " in note


@pytest.mark.parametrize(
    "argv",
    [
        ["--model-path", "x", "--trust-remote-code", "--json-model-override-args", '{"a": "b=c"}'],
        ["--cuda-graph-backend-prefill", "full", "--mamba-radix-cache-strategy", "no_buffer"],
        ["--served-model-name", "tc_piecewise"],
    ],
)
def test_todays_command_line_stays_as_it_is(argv: list[str]) -> None:
    assert modernise_argv(argv) == (argv, [])


def test_a_variable_that_is_set_is_explained() -> None:
    assert explain_environment({"SGLANG_PLUGINS": "dflash"}) == []
    [line] = explain_environment({"SGLANG_ENABLE_SPEC_V2": "0"})
    assert "--disable-overlap-schedule" in line
    [line] = explain_environment({"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})
    assert "target's own limit" in line


WINDOW = ["--speculative-dflash-draft-window-size", "4096"]


@pytest.mark.sglang
def test_the_commands_parse_with_this_package() -> None:
    pytest.importorskip("sglang")
    commands = [card(name).arguments for name in NAMES]
    *cards, window = outcomes([*commands, [*commands[0], *WINDOW]], resolve=False)
    for name, found in zip(NAMES, cards, strict=True):
        values = (None, "breakable", None, 8, 0.8) if name == "Qwen3.5-4B" else (None, None, 16, None, 0.75)
        assert found == dict(zip(FIELDS, ("extra_buffer", *values), strict=True))
    assert window["speculative_draft_window_size"] == 4096
