"""The command: servers that cannot be diagnosed are one message, others get a verdict and figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash_lab.bench.server import free_port
from tests.diagnose.fake_server import INFO, serve, server_info


def diagnose(url: str, *options: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["diagnose", url, *options])
    return ended.exit_code, ended.output


def test_an_absent_server_is_one_message() -> None:
    code, output = diagnose(f"127.0.0.1:{free_port()}")
    assert code == 2 and "no SGLang server answers" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("info", "status", "named"),
    [
        (INFO | {"speculative_algorithm": None}, 200, "no speculation"),
        (INFO | {"speculative_algorithm": "EAGLE3"}, 200, "EAGLE3"),
        (INFO | {"skip_tokenizer_init": True}, 200, "--skip-tokenizer-init"),
        ({}, 401, "--api-key"),
        ({}, 500, "answered 500"),
    ],
)
def test_a_server_that_cannot_be_diagnosed_is_one_message(info: dict[str, Any], status: int, named: str) -> None:
    with serve(info, status) as url:
        code, output = diagnose(url)
    assert code == 2 and named in output and "Traceback" not in output, output


@pytest.mark.parametrize(
    ("accepted", "code", "begins"),
    [(3, 0, "HEALTHY: 4.0 tokens per step.\nNo problem was found."), (0, 1, "LOW ACCEPTANCE: 1.0 tokens per step.\n")],
)
@pytest.mark.parametrize("info", [server_info(drafting={"pays": None}), INFO], ids=["sglang-dflash", "SGLang's worker"])
def test_the_verdict_comes_first_then_the_figures(info: dict[str, Any], accepted: int, code: int, begins: str) -> None:
    info = info | {"internal_states": [info["internal_states"][0] | {"avg_spec_accept_length": None}]}
    with serve(info, accepted=accepted) as url:
        ended = CliRunner().invoke(app, ["diagnose", url])
        status, output = diagnose(url, "--json")
    assert (ended.exit_code, status) == (code, code)
    assert ended.stdout.startswith(begins), ended.stdout
    assert "Sending 36 prompts. This takes about " in ended.stderr
    assert all(f"\n  {name} " in ended.stdout for name in ("chat template", "raw prompts", "8 users at once"))
    found = json.loads(output[output.index("{") :])
    assert len(found["probes"]) == 6 and len(found["survival"]) == 15 and bool(found["verdict"]) == bool(code)
