"""Client libraries, unchanged, see of a DFLASH server what they see of a plain one.

``make test-tools`` installs them; where they are missing, the tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.bench import clients
from tests.bench.test_other_tools import ENVIRONMENTS
from tests.support.servers import FEATURES, Server, dflash_server, plain_server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

PAIR = "tiny-hybrid"
BASE = (*FEATURES, "--enable-cache-report")
CLIENTS = ENVIRONMENTS / "clients" / "bin" / "python"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Plain decoding, then DFLASH."""
    with (
        plain_server(PAIR, tmp_path_factory.mktemp("plain"), base=BASE) as plain,
        dflash_server(PAIR, tmp_path_factory.mktemp("dflash"), "--speculative-adaptive", base=BASE) as dflash,
    ):
        yield plain, dflash


@pytest.mark.parametrize("library", ["openai", "anthropic"])
def test_a_client_sees_plain_decoding(servers: tuple[Server, Server], library: str) -> None:
    if not CLIENTS.exists():
        pytest.skip("no client libraries: `make test-tools` installs them")
    seen = []
    for server in servers:
        command = [str(CLIENTS), clients.__file__, library, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-6000:]
        seen.append(json.loads(done.stdout))
    assert len(seen[0]) == len(seen[1]) >= 6
    for number, (plain, dflash) in enumerate(zip(*seen, strict=True)):
        differences = list(different(plain, dflash))
        assert not differences, (number, differences[:3])


def different(plain: Any, dflash: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two answers differ, log-probabilities by more than rounding."""
    if isinstance(plain, dict) and isinstance(dflash, dict):
        for key in plain.keys() | dflash.keys():
            yield from different(plain.get(key), dflash.get(key), f"{path}.{key}")
    elif isinstance(plain, list) and isinstance(dflash, list) and len(plain) == len(dflash):
        for i, pair in enumerate(zip(plain, dflash, strict=True)):
            yield from different(*pair, f"{path}[{i}]")
    elif plain != (pytest.approx(dflash, abs=1e-4) if isinstance(dflash, float) else dflash):
        yield path, plain, dflash
