"""Release and resume with ``--enable-memory-saver``: nothing that was lost in between is read afterwards.

The CPU has no memory that can be unmapped: ``tests/memory_saver`` overwrites it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflash_lab.pairs import target_path
from tests.support.generation import counted, flush, generate_all
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import ONE_WIDTH, WINDOWED, Server, dflash_server, path_with, with_plugin, worker_info

PAIR = "tiny-hybrid"


def ask(server: Server) -> list[tuple[list[int], int]]:
    flush(server)
    return counted(generate_all(server, [*corpus(PAIR, 4), *random_prompts(PAIR, 2)], 6, 48))


def sleep(server: Server, tags: list[str | None]) -> None:
    """As trainers do: by tag, an update of the target alone in between; text and accept counts are as before."""
    before, bodies = ask(server), [{} if tag is None else {"tags": [tag]} for tag in tags]
    for _ in range(2):
        for body in bodies:
            assert server.post("/release_memory_occupation", body).status_code == 200
        for body in bodies:
            assert server.post("/resume_memory_occupation", body).status_code == 200
            if body.get("tags") != ["kv_cache"]:
                loaded = server.post("/update_weights_from_disk", {"model_path": str(target_path(PAIR))})
                assert loaded.status_code == 200, loaded.text
        assert ask(server) == before
    memory, regions = worker_info(server)["memory_bytes"], json.loads((server.folder / "regions.json").read_text())
    # What is inside the regions. Token histories are not; SGLang's slot table, about as large, is.
    assert regions["weights"] > memory["target_weights"] + memory["drafter_weights"]
    pools = sum(memory[name] for name in ("target_kv", "draft_kv", "states", "scratch"))
    assert pools <= regions["kv_cache"] < pools + (2 * memory["history"] or pools)


@pytest.mark.engine
def test_after_a_resume_nothing_stale_is_read(windowed_hybrid: Server) -> None:
    sleep(windowed_hybrid, ["weights", "kv_cache"])


@pytest.mark.engine
@pytest.mark.slow
def test_after_a_resume_of_everything_no_copy_is_stale(tmp_path: Path) -> None:
    environment = {**with_plugin(tmp_path, "memory"), "PYTHONPATH": path_with("plugin", "memory_saver")}
    with dflash_server(PAIR, tmp_path, *WINDOWED, *ONE_WIDTH, **environment) as server:
        sleep(server, [None])
