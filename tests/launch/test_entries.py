"""Every entry into a server counts the drafts that were verified and reports adaptive widths.

HTTP with one tokenizer: ``tests/width/test_width_engine.py``; an engine in Python: ``tests/rehearsal``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.generation import generate_all
from tests.support.prompts import corpus
from tests.support.servers import RANDOM_WIDTHS, Server, dflash_server

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"


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
    """Each answers some of the requests.

    A worker that needs longer to import SGLang than uvicorn waits for it is killed and started again, without end.
    """
    patience = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "240"}
    workers = ("--tokenizer-worker-num", "2", "--detokenizer-worker-num", "2")
    base = ("--dtype", "float32", "--max-running-requests", "8")
    with dflash_server(PAIR, tmp_path, *RANDOM_WIDTHS, *workers, base=base, **patience) as server:
        answers = generate_all(server, corpus(PAIR, 8), 8, 32)
        assert_counts_verified_drafts([answer.meta for answer in answers])
        assert all(server.get("/server_info").json()["speculative_adaptive"] for _ in range(4))
