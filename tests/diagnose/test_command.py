"""The command: servers that cannot be diagnosed are one message, others get a verdict and figures."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash.check.diagnose.probe import TRIAL, Probe, fit
from sglang_dflash_lab.bench.server import free_port
from tests.diagnose.fake_server import INFO, serve, server_info

PROBES = "chat template", "thinking on", "raw prompts", "temperature 1", "long context", "all at once"


def diagnose(url: str, *options: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["diagnose", url, *options])
    return ended.exit_code, ended.output


def test_an_absent_server_is_one_message() -> None:
    code, output = diagnose(f"127.0.0.1:{free_port()}")
    assert code == 2 and "no SGLang server answers" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("info", "status", "named"),
    [
        (INFO | {"speculative_algorithm": None}, 200, "speculative algorithm is unset"),
        (INFO | {"speculative_algorithm": "EAGLE3"}, 200, "EAGLE3"),
        (INFO | {"skip_tokenizer_init": True}, 200, "--skip-tokenizer-init"),
        (INFO | {"speculative_draft_model_path": None}, 200, "no drafter to judge"),
        ({}, 401, "--api-key"),
        ({}, 500, "answered 500"),
    ],
)
def test_a_server_that_cannot_be_diagnosed_is_one_message(info: dict[str, Any], status: int, named: str) -> None:
    with serve(info, status) as url:
        code, output = diagnose(url)
    assert code == 2 and named in output and "Traceback" not in output, output


@pytest.mark.parametrize(
    ("accepted", "code", "verdict"),
    [(3, 0, "HEALTHY: 4.0 tokens per step.\nNo problem was found."), (0, 1, "LOW ACCEPTANCE: 1.0 tokens per step.\n")],
)
@pytest.mark.parametrize("info", [server_info(drafting={"pays": None}), INFO], ids=["sglang-dflash", "SGLang's worker"])
def test_facts_come_first_then_a_line_per_probe_and_the_verdict(
    info: dict[str, Any], accepted: int, code: int, verdict: str
) -> None:
    info = info | {"internal_states": [info["internal_states"][0] | {"avg_spec_accept_length": None}]}
    with serve(info, accepted=accepted) as url:
        status, output = diagnose(url)
        as_json = CliRunner().invoke(app, ["diagnose", url, "--json"])
    assert (status, as_json.exit_code) == (code, code)
    shown = ["target + drafter", "No block", "Sending 36 prompts", *PROBES, "survival of drafts", verdict]
    places = [output.index(each) for each in shown]
    assert places == sorted(places), output
    found = json.loads(as_json.stdout)
    assert [row["answers"] for row in found["probes"]] == [12, 4, 4, 4, 4, 8] and not found["partial"]
    assert len(found["survival"]) == 15 and bool(found["verdict"]) == bool(code)
    assert "up to 36 short prompts" in diagnose("--help")[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None], ids=["Ctrl-C", "SIGTERM", "--seconds"])
def test_an_interruption_ends_with_a_verdict_from_the_answers_so_far(number: signal.Signals | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job lacks
    options = ("--json",) if number else ("--json", "--seconds", "2")
    interrupt = partial(os.kill, os.getpid(), number) if number else lambda: None
    second = [(15, 1, [12, 2])] if number else []  # a busy machine may get fewer prompts in two seconds
    for answers, code, probes in (*second, (4, 1, [3]), (1, 2, None)):  # the first answer is the trial's
        with serve(INFO, accepted=0, answers=answers, stuck=interrupt) as url:
            ended = CliRunner().invoke(app, ["diagnose", url, *options])
        assert ended.exit_code == code, ended.output
        if probes is None:
            assert "no answer took a verify step" in ended.output and "Traceback" not in ended.output
            continue
        found = json.loads(ended.stdout)
        assert found["partial"] and [row["answers"] for row in found["probes"]] == probes
        assert "Too few drafts are accepted" in found["verdict"][0] and found["measured"] == 1.0


@pytest.mark.parametrize(
    ("tokens_per_second", "prompts", "tokens"),
    [
        (1000, [12, 4, 4, 4, 4, 8], 128),
        (50, [12, 4, 4, 4, 4, 8], 83),  # 3,000 tokens in a minute
        (30, [6, 2, 2, 2, 2, 4], 100),
        (10, [6, 2, 2, 2, 2, 4], 33),
        (1, [6, 2, 2, 2, 2, 4], 16),
    ],
)
def test_a_slow_server_gets_shorter_answers_then_half_of_the_prompts(
    tokens_per_second: float, prompts: list[int], tokens: int
) -> None:
    planned = [Probe("", prompts=12), *(Probe("") for _ in range(4)), Probe("", prompts=8, users=8)]
    trial = Probe("")
    trial.tokens, trial.seconds = TRIAL, TRIAL / tokens_per_second
    assert fit(planned, trial, 128, 60) == (tokens, pytest.approx(sum(prompts) * tokens / tokens_per_second))
    assert [probe.prompts for probe in planned] == prompts and planned[-1].users == prompts[-1]
