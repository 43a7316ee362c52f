from __future__ import annotations

import logging
from argparse import ArgumentParser

import pytest

from sglang_dflash.check.flags import modernise_argv, modernise_kwargs
from sglang_dflash.errors import DFlashError
from sglang_dflash.hooks.flags import accept_old_flags, accept_old_keywords, explain_environment

UNTOUCHED = ["--model-path", "x", "--trust-remote-code", "--json-model-override-args", '{"a": "b=c"}']


def test_todays_command_line_stays_as_it_is() -> None:
    assert modernise_argv(UNTOUCHED) == (UNTOUCHED, [])


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


def test_a_kept_value_of_a_touched_flag_is_not_told() -> None:
    argv = ["--cuda-graph-backend-prefill", "full", "--mamba-radix-cache-strategy", "no_buffer"]
    assert modernise_argv(argv) == (argv, [])


def test_an_old_flag_without_its_value_is_left_to_the_parser() -> None:
    assert modernise_argv(["--mamba-scheduler-strategy"]) == (["--mamba-scheduler-strategy"], [])


@pytest.mark.parametrize("order", [1, -1])
def test_old_and_new_must_not_contradict(order: int) -> None:
    pair = [["--mamba-scheduler-strategy", "extra_buffer"], ["--mamba-radix-cache-strategy", "no_buffer"]]
    with pytest.raises(DFlashError, match="both mean --mamba-radix-cache-strategy"):
        modernise_argv(sum(pair[::order], []))
    with pytest.raises(DFlashError, match="both mean --speculative-draft-window-size"):
        modernise_kwargs({"speculative_dflash_draft_window_size": 64, "speculative_draft_window_size": 128})


def test_old_and_new_may_agree() -> None:
    argv = ["--speculative-dflash-draft-window-size", "64", "--speculative-draft-window-size", "64"]
    assert modernise_argv(argv)[0] == ["--speculative-draft-window-size", "64"] * 2
    both = {"speculative_dflash_draft_window_size": 64, "speculative_draft_window_size": 64}
    assert modernise_kwargs(both)[0] == {"speculative_draft_window_size": 64}


def test_engine_arguments_become_todays() -> None:
    modern, notes = modernise_kwargs(
        {
            "model_path": "x",
            "mamba_scheduler_strategy": "extra_buffer",
            "speculative_dflash_draft_window_size": 64,
            "cuda_graph_backend_prefill": "tc_piecewise",
        }
    )
    assert modern == {
        "model_path": "x",
        "mamba_radix_cache_strategy": "extra_buffer",
        "speculative_draft_window_size": 64,
        "cuda_graph_backend_prefill": "breakable",
    }
    assert len(notes) == 3


class TestEnvironment:
    def test_nothing_set_nothing_said(self) -> None:
        assert explain_environment({"SGLANG_PLUGINS": "dflash"}) == []

    @pytest.mark.parametrize("name", ["SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2"])
    def test_switched_on_is_not_needed_and_switched_off_names_the_flag(self, name: str) -> None:
        assert "not needed" in explain_environment({name: "1"})[0]
        assert "--disable-overlap-schedule" in explain_environment({name: "0"})[0]
        assert "--disable-overlap-schedule" in explain_environment({name: "false"})[0]

    def test_variables_that_sglang_still_reads(self) -> None:
        lines = explain_environment(
            {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        )
        assert len(lines) == 2
        assert "SGLang reads it" in lines[0]
        assert "target's own limit" in lines[1]


class TestParser:
    def parser(self) -> ArgumentParser:
        parser = ArgumentParser()
        parser.add_argument("--mamba-radix-cache-strategy", default="auto")
        accept_old_flags(None, parser)
        return parser

    def test_parses_old_flags_and_logs_them(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            parsed = self.parser().parse_args(["--mamba-scheduler-strategy", "extra_buffer"])
        assert parsed.mamba_radix_cache_strategy == "extra_buffer"
        assert [record.getMessage() for record in caplog.records] == [
            "DFLASH: --mamba-scheduler-strategy extra_buffer is now --mamba-radix-cache-strategy extra_buffer"
        ]

    def test_reads_the_process_arguments_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", ["prog", "--mamba-scheduler-strategy=no_buffer"])
        assert self.parser().parse_args().mamba_radix_cache_strategy == "no_buffer"

    def test_a_contradiction_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["--mamba-scheduler-strategy", "extra_buffer", "--mamba-radix-cache-strategy", "auto"]
        with pytest.raises(SystemExit) as stopped:
            self.parser().parse_args(argv)
        assert stopped.value.code == 2
        assert "keep only --mamba-radix-cache-strategy" in capsys.readouterr().err


def test_an_engine_class_takes_old_keywords() -> None:
    class Engine:
        server_args_class = dict

    accept_old_keywords(Engine)
    assert Engine().server_args_class(mamba_scheduler_strategy="auto", tp_size=2) == {
        "mamba_radix_cache_strategy": "auto",
        "tp_size": 2,
    }
