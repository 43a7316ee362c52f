"""Each published card's command line on a shrunk pair of its structure, through every way to launch it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.serving.shrunk_cards import FLOAT32, RICHEST, assert_served_here, build, generate, prompts
from tests.support.cards import NAMES, card
from tests.support.checkpoints import assert_greedy
from tests.support.generation import flush
from tests.support.pair_servers import assert_memory_as_estimated, memory_estimate, with_plugin, worker_info
from tests.support.servers import LAUNCH_SERVER, SGLANG_SERVE, Server, running

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_targets_and_memory_is_as_estimated(name: str, tmp_path: Path) -> None:
    target = build(name, tmp_path)
    pair = {"target": tmp_path / "target", "drafter": tmp_path / "drafter"}
    flags = [*card(name).arguments_for(**pair), *FLOAT32]
    oracle = tmp_path / "answers.json"  # drafts are right once it is there: a random drafter's never are
    with running(tmp_path, *flags, **card(name).environment, **with_plugin(tmp_path, "oracle")) as server:
        answers = generate(server)
        oracle.write_text(json.dumps([p + a["output_ids"] for p, a in zip(prompts(), answers, strict=True)]))
        flush(server)
        accepting = generate(server)
        allocation, found = worker_info(server)["memory_bytes"], sizes(server)
    for prompt, answer, again in zip(prompts(), answers, accepting, strict=True):
        assert_greedy(target, prompt, answer["output_ids"])
        assert again["output_ids"] == answer["output_ids"]
    assert 0 < 2 * blocks(accepting) < blocks(answers)
    assert_memory_as_estimated(memory_estimate(*pair.values(), *flags, *found), allocation)


def blocks(answers: list[dict[str, Any]]) -> int:
    """Blocks that the target verified."""
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def sizes(server: Server) -> list[str]:
    """As flags, the sizes that the server found for this machine."""
    info = server.get("/server_info").json()
    slots = re.search(r"max_mamba_cache_size: (\d+)", server.log)
    assert slots is not None
    running_requests = info["internal_states"][0]["effective_max_running_requests_per_dp"]
    return [
        *("--max-total-tokens", str(info["max_total_num_tokens"])),
        *("--max-mamba-cache-size", slots[1]),
        *("--max-running-requests", str(running_requests)),
    ]


@pytest.mark.parametrize(("name", "launcher"), [*((name, LAUNCH_SERVER) for name in NAMES), (RICHEST, SGLANG_SERVE)])
def test_the_command_as_printed_serves(name: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    build(name, tmp_path)
    arguments = card(name).arguments_for(tmp_path / "target", tmp_path / "drafter")
    with running(tmp_path, *arguments, launcher=launcher, **card(name).environment) as server:
        assert_served_here(generate(server), server)
