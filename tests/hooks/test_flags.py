from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash.hooks.flags import explain_environment, modernise_argv, modernise_kwargs


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("--mamba-scheduler-strategy", "extra_buffer"), ("--mamba-radix-cache-strategy", "extra_buffer")),
        (("--speculative-dflash-draft-window-size", "4096"), ("--speculative-draft-window-size", "4096")),
        (("--cuda-graph-backend-prefill", "tc_piecewise"), ("--cuda-graph-backend-prefill", "breakable")),
    ],
)
def test_an_old_flag_becomes_todays_and_is_told(old: tuple[str, str], new: tuple[str, str], joined: bool) -> None:
    given = ["=".join(old)] if joined else list(old)
    argv, notes = modernise_argv([*given, "--tp-size", "2"])
    assert argv == [*new, "--tp-size", "2"]
    assert notes == [f"{old[0]} {old[1]} is now {new[0]} {new[1]}"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--model-path", "x", "--trust-remote-code", "--json-model-override-args", '{"a": "b=c"}'],
        ["--cuda-graph-backend-prefill", "full", "--mamba-radix-cache-strategy", "no_buffer"],
        ["--mamba-scheduler-strategy"],  # without its value: left to the parser
    ],
)
def test_todays_command_line_stays_as_it_is(argv: list[str]) -> None:
    assert modernise_argv(argv) == (argv, [])


def test_old_and_new_keywords_must_not_contradict() -> None:
    """As on a command line: ``test_card_commands.py``."""
    with pytest.raises(DFlashError, match="both mean --speculative-draft-window-size"):
        modernise_kwargs({"speculative_dflash_draft_window_size": 64, "speculative_draft_window_size": 128})


class TestEnvironment:
    def test_nothing_set_nothing_said(self) -> None:
        assert explain_environment({"SGLANG_PLUGINS": "dflash"}) == []

    @pytest.mark.parametrize("name", ["SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2"])
    def test_switched_on_is_not_needed_and_switched_off_names_the_flag(self, name: str) -> None:
        assert "not needed" in explain_environment({name: "1"})[0]
        assert "--disable-overlap-schedule" in explain_environment({name: "0"})[0]
        assert "--disable-overlap-schedule" in explain_environment({name: "false"})[0]

    def test_a_variable_that_sglang_still_reads(self) -> None:
        [line] = explain_environment({"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})
        assert "target's own limit" in line

    @pytest.mark.sglang
    @pytest.mark.parametrize("value", ["1", "0"])
    def test_the_plan_stream_has_no_effect_under_our_worker(self, value: str) -> None:
        """For DFLASH, SGLang reads it only in its own worker's draft input, which our worker does not use."""
        sglang = pytest.importorskip("sglang")
        from sglang_dflash.worker.state import DraftState

        [line] = explain_environment({"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": value})
        assert "has no effect" in line
        folder = Path(sglang.__path__[0], "srt/speculative")
        text = {path.name: path.read_text() for path in folder.glob("*.py")}
        assert {name for name in text if "SGLANG_ENABLE_OVERLAP_PLAN_STREAM" in text[name]} == {
            "dflash_info_v2.py",
            "spec_utils.py",
        }
        assert not [name for name in text if name.startswith("dflash") and "get_plan_stream(" in text[name]]
        assert {each.__module__.partition(".")[0] for each in DraftState.__mro__ if "prepare" in str(vars(each))} == {
            "sglang_dflash"
        }
