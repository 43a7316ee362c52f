"""One recurrent state per request: what a server then allocates, and that its tokens and blocks are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.generation import assert_nothing_leaked, counted, flush, generate_all
from tests.support.prompts import corpus
from tests.support.servers import FEATURES, Server, dflash_server, with_plugin, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"


def scratch_and_blocks(server: Server) -> tuple[int, list[tuple[list[int], int]]]:
    flush(server)
    answers = generate_all(server, corpus(PAIR, 16, 3), 8, 96)
    answers += generate_all(server, corpus(PAIR, 16, 3), 1, 96)  # prefix hits
    assert_nothing_leaked(server)
    scratch = worker_info(server)["memory_bytes"]["scratch"]
    return scratch, counted(answers)


@pytest.mark.slow
def test_a_replay_takes_a_fifth_of_the_scratch_at_most_and_the_same_blocks(
    dflash_hybrid: Server, tmp_path: Path
) -> None:
    variables = {**with_plugin(tmp_path, "memory"), "SGLANG_DFLASH_STATE_REPLAY": "0"}
    with dflash_server(PAIR, tmp_path, base=FEATURES, **variables) as server:
        kept, expected = scratch_and_blocks(server)
        assert "replayed" not in server.log
    replayed, found = scratch_and_blocks(dflash_hybrid)
    assert "replayed" in dflash_hybrid.log
    assert replayed < 0.2 * kept
    assert found == expected
