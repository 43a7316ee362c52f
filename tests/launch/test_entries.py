"""The entries of ``docs/compatibility.md``: whoever starts SGLang gets this package's worker, hooked whole.

Every entry into a server counts the drafts that were verified and reports adaptive widths.

HTTP with one tokenizer: ``tests/width/test_width_engine.py``; an engine in Python: ``tests/rehearsal``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash_lab.bench.server import free_port
from tests.launch import entries
from tests.launch.entries import ENTRIES, TOKENS, Answer, of_server
from tests.support import preloaded
from tests.support.generation import generate_all
from tests.support.prompts import corpus
from tests.support.servers import (
    LAUNCH_SERVER,
    RANDOM_WIDTHS,
    SGLANG_SERVE,
    Server,
    dflash_server,
    draft_arguments,
    running,
    target_arguments,
)

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
BASE = ("--dtype", "float32", "--max-running-requests", "4")
DENSE = (*target_arguments(entries.PAIR, BASE), *draft_arguments(entries.PAIR))


def assert_counts_verified_drafts(metas: list[dict[str, Any]]) -> None:
    for meta in metas:
        steps, drafts = meta["spec_verify_ct"], meta["spec_num_proposed_drafts"]
        assert drafts == round((meta["spec_cap_length"] - 1) * steps) < 15 * steps
        assert meta["spec_accept_rate"] == pytest.approx(meta["spec_num_correct_drafts"] / drafts)


def test_grpc(random_widths_hybrid: Server) -> None:
    """SGLang's native gRPC server, in the process of the HTTP server. Its messages are written and read as bytes."""
    info = random_widths_hybrid.get("/server_info").json()
    assert info["speculative_adaptive"] and info["internal_states"][0]["speculative_adaptive"]
    grpc = pytest.importorskip("grpc")
    text, sampling = b"Calculate 12 + 30.", b"\x0d\0\0\0\0\x40\x40\x60\x01"  # temperature 0, 64 tokens, ignore_eos
    request = b"\n%c%b\x12%c%b" % (len(text), text, len(sampling), sampling)
    with grpc.insecure_channel(f"127.0.0.1:{info['grpc_port']}") as channel:
        service = "/sglang.runtime.v1.SglangService"
        *_, answer = channel.unary_stream(f"{service}/TextGenerate")(request, timeout=120)
        assert b'"speculative_adaptive": true' in channel.unary_unary(f"{service}/GetServerInfo")(b"", timeout=60)
    # entries of a map from strings to strings: field 1 is the name, field 2 the value
    meta = {name.decode(): float(value) for name, value in re.findall(rb"\n.(spec_\w+)\x12.([\d.]+)", answer)}
    assert_counts_verified_drafts([meta])


@pytest.mark.slow
def test_tokenizer_and_detokenizer_workers(tmp_path: Path) -> None:
    """Of ``sglang serve``; each answers some of the requests.

    A worker that needs longer to import SGLang than uvicorn waits for it is killed and started again, without end.
    """
    patience = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "240"}
    workers = ("--tokenizer-worker-num", "2", "--detokenizer-worker-num", "2")
    base = ("--dtype", "float32", "--max-running-requests", "8")
    with dflash_server(
        PAIR, tmp_path, *RANDOM_WIDTHS, *workers, base=base, launcher=SGLANG_SERVE, **patience
    ) as server:
        answers = generate_all(server, corpus(PAIR, 8), 8, 32)
        assert_counts_verified_drafts([answer.meta for answer in answers])
        assert all(server.get("/server_info").json()["speculative_adaptive"] for _ in range(4))
        streamed = [of_server(server.url) for _ in range(4)]
        assert all(each.ours == [] and set(each.cut) == {1} for each in streamed)


def assert_ours(answer: Answer, log: str) -> None:
    """Every process is hooked: a chunk has one token where SGLang's parsers read it, and no key of this package."""
    assert "serves DFLASH: " in log and "SGLang's own worker" not in log
    assert answer.ours == [] and set(answer.cut) <= {1}
    assert answer.text.startswith("Noah starts with 27 coins.") and answer.steps < TOKENS / 2


def run_entry(entry: str, **environment: str) -> None:
    """Run a program of ``tests/launch/entries.py`` and check its answer."""
    done = preloaded.run("-m", "tests.launch.entries", entry, environment={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-6000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith('{"text"')]
    assert_ours(Answer(**json.loads(line)), done.stdout + done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [entry.__name__ for entry in ENTRIES])
def test_pythons_api(entry: str) -> None:
    run_entry(entry)


@pytest.mark.slow
def test_sglangs_rust_server(tmp_path: Path) -> None:
    with running(tmp_path, *DENSE, SGLANG_RUST_SERVER="1") as server:
        answer = of_server(server.url)
        assert_ours(replace(answer, cut=[]), server.log)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"SGLANG_PLATFORM": "dflash_cpu"}, {"SGLANG_PLUGINS": "dflash,dflash_cpu"}])
def test_variables_that_name_this_package(environment: dict[str, str]) -> None:
    run_entry("engine_of_resolved_arguments", **environment)


@contextlib.contextmanager
def second_node(folder: Path, *arguments: str) -> Iterator[Path]:
    """The second node of a server; its log."""
    command = [sys.executable, *LAUNCH_SERVER, *arguments, "--node-rank", "1", "--port", str(free_port())]
    with (folder / "second.log").open("wb") as log:
        process = preloaded.start(command, log, dict(os.environ))
    try:
        yield folder / "second.log"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("block", ["16", "8"])
def test_two_nodes_compare_their_plans(block: str, tmp_path: Path) -> None:
    """Two launches on this machine with a rank each. SGLang itself compares no arguments."""
    nodes = *DENSE, "--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"
    other = "--speculative-num-draft-tokens", block
    with second_node(tmp_path, *nodes, *other) as log, contextlib.ExitStack() as stack:
        if block == "16":
            server = stack.enter_context(running(tmp_path, *nodes, "--node-rank", "0"))
            assert_ours(of_server(server.url), server.log + log.read_text())
            return
        with pytest.raises(AssertionError, match="plans: block is 16 and 8.*with the same flags"):
            stack.enter_context(running(tmp_path, *nodes, "--node-rank", "0"))
        assert "the nodes have different plans: block is 16 and 8" in log.read_text()
