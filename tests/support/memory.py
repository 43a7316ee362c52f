"""The memory table of ``sglang-dflash check`` beside what a server allocated for the same flags."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.hooks.reports import SERVER_INFO_KEY
from tests.support.servers import Server

TOLERANCE = 0.001  # vectors that SGLang keeps in float32 whatever the dtype (A_log)


def estimated(target: Path, drafter: Path, *flags: str) -> dict[str, int]:
    """Bytes of every pool, from the command line; on a machine large enough for whatever ``flags`` ask for."""
    command = [sys.executable, "-m", "sglang_dflash.cli", "check", "--json", "--memory-gib", "64"]
    pair = [str(target), str(drafter), "--device", "cpu"]
    done = subprocess.run([*command, *pair, *flags], stdout=subprocess.PIPE, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["memory"], report["findings"]
    return dict(report["memory"]["served"]["bytes"])


def allocated(server: Server) -> dict[str, int]:
    """Bytes of every pool, read from the server's allocators."""
    state = server.get("/server_info").json()["internal_states"][0]
    return dict(state[SERVER_INFO_KEY]["memory_bytes"])


def assert_as_estimated(estimate: dict[str, int], allocation: dict[str, int]) -> None:
    assert estimate.keys() == allocation.keys()
    for pool, size in allocation.items():
        print(f"{pool}: {size} bytes allocated, {estimate[pool]} estimated")
        assert estimate[pool] == pytest.approx(size, rel=TOLERANCE), pool
