"""The card with the most flags through SGLang's other entry points, and through its launch script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.bench.server import free_port
from sglang_dflash.hooks.reports import SERVER_INFO_KEY
from tests.support.cards import card
from tests.support.checkpoints import assert_greedy
from tests.support.servers import SGLANG_SERVE, running, started
from tests.support.shrunk_cards import RICHEST, assert_served_here, build, generate, prompts, request

pytestmark = pytest.mark.engine

SERVE = str(Path(__file__).parents[2] / "launch" / "serve.sh")
PRINTED = card(RICHEST)


@pytest.mark.slow
def test_sglang_serve(tmp_path: Path) -> None:
    build(RICHEST, tmp_path)
    arguments = PRINTED.arguments_for(tmp_path / "target", tmp_path / "drafter")
    with running(tmp_path, *arguments, launcher=SGLANG_SERVE, **PRINTED.environment) as server:
        assert_served_here(generate(server), server)


@pytest.mark.slow
def test_an_engine(tmp_path: Path) -> None:
    target = build(RICHEST, tmp_path)
    keywords = PRINTED.keywords_for(tmp_path / "target", tmp_path / "drafter")
    asked = {"keywords": {**keywords, "dtype": "float32", "port": free_port()}, "requests": [request()]}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "support" / "run_engine.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **PRINTED.environment},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    assert SERVER_INFO_KEY in printed["state"]
    for prompt, answer in zip(prompts(), *printed["answers"], strict=True):
        assert answer["meta_info"]["spec_verify_ct"] > 0
        assert_greedy(target, prompt, answer["output_ids"])


@pytest.mark.slow
def test_the_launch_script(tmp_path: Path) -> None:
    build(RICHEST, tmp_path)
    port = free_port()
    knobs = {"TARGET": str(tmp_path / "target"), "DRAFTER": str(tmp_path / "drafter"), "PYTHON": sys.executable}
    with started(
        tmp_path, port, [SERVE, RICHEST.lower()], LISTEN_HOST="127.0.0.1", LISTEN_PORT=str(port), **knobs
    ) as server:
        assert_served_here(generate(server), server)


@pytest.mark.slow
def test_the_demo_script(tmp_path: Path) -> None:
    port = free_port()
    with started(tmp_path, port, [SERVE, "demo"], PYTHON=sys.executable, LISTEN_PORT=str(port)) as server:
        body = {"model": "m", "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "temperature": 0}
        answer = server.post("/v1/chat/completions", body).json()
        assert "serves DFLASH" in server.log
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"]
