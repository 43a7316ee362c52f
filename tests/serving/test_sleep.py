"""Release and resume with ``--enable-memory-saver``: nothing that was lost in between is read afterwards.

The CPU has no memory that can be unmapped: ``tests/memory_saver`` overwrites it.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import pytest

from sglang_dflash_lab.pairs import target_path
from tests.support.generation import counted, flush, generate_all
from tests.support.pair_servers import dflash_server, worker_info
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import Server

PAIR = "tiny-hybrid"
SAVER = Path(__file__).parents[1] / "memory_saver"


def ask(server: Server) -> list[tuple[list[int], int]]:
    flush(server)
    return counted(generate_all(server, [*corpus(PAIR, 4), *random_prompts(PAIR, 2)], 6, 48))


@pytest.mark.engine
@pytest.mark.parametrize("tags", [["weights", "kv_cache"], pytest.param([None], marks=pytest.mark.slow)])
def test_after_a_resume_nothing_stale_is_read(tags: list[str | None], tmp_path: Path) -> None:
    """As trainers sleep: by tag, an update of the target alone in between; text and accept counts are as before."""
    flags = ("--enable-memory-saver", "--speculative-draft-window-size", "24")
    path = os.pathsep.join(filter(None, (str(SAVER), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "SGLANG_DFLASH_TEST_FOLDER": str(tmp_path), "SGLANG_DFLASH_COPIES": "1"}
    with dflash_server(PAIR, tmp_path, *flags, **environment) as server:
        assert "backed up" in server.log
        before = ask(server)
        for _ in range(2):
            for tag in tags:
                body = {} if tag is None else {"tags": [tag]}
                assert server.post("/release_memory_occupation", body).status_code == 200
            for tag in tags:
                body = {} if tag is None else {"tags": [tag]}
                assert server.post("/resume_memory_occupation", body).status_code == 200
                if tag in ("weights", None):
                    loaded = server.post("/update_weights_from_disk", {"model_path": str(target_path(PAIR))})
                    assert loaded.status_code == 200, loaded.text
            assert ask(server) == before
        memory, regions = worker_info(server)["memory_bytes"], json.loads((tmp_path / "regions.json").read_text())
    # What is inside the regions; token histories are not.
    assert regions["weights"] > memory["target_weights"] + memory["drafter_weights"]
    pools = sum(memory[name] for name in ("target_kv", "draft_kv", "states", "scratch"))
    assert pools <= regions["kv_cache"] < pools + memory["history"]


@pytest.mark.sglang
def test_sglang_backs_up_the_drafter_by_the_flag_that_the_plan_sets() -> None:
    from sglang.srt.model_executor.model_runner_components import load_model_utils
    from sglang.srt.model_executor.runner_backend import full_cuda_graph_backend

    source = " ".join(inspect.getsource(load_model_utils.load_model_with_memory_saver).split())
    assert "is_draft_worker and get_exec().features.enable_draft_weights_cpu_backup" in source
    assert "region( GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=enable_cpu_backup" in source
    assert "_memory_saver_adapter.cuda_graph" in inspect.getsource(full_cuda_graph_backend)
