"""Each published card's command line, as printed but for the models' paths, on a shrunk pair of its structure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cards import NAMES, PLAIN_SGLANG_SAYS, card
from tests.support.checkpoints import assert_greedy
from tests.support.memory import allocated, assert_as_estimated, estimated
from tests.support.pair_servers import with_plugin
from tests.support.servers import Server, run_to_exit, running
from tests.support.shrunk_cards import FLOAT32, assert_served_here, build, generate, prompts

pytestmark = pytest.mark.engine


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_targets_and_memory_is_as_estimated(name: str, tmp_path: Path) -> None:
    target = build(name, tmp_path)
    pair = {"target": tmp_path / "target", "drafter": tmp_path / "drafter"}
    flags = [*card(name).arguments_for(**pair), *FLOAT32]
    oracle = tmp_path / "answers.json"  # drafts are right once it is there: a random drafter's never are
    with running(tmp_path, *flags, **card(name).environment, **with_plugin(tmp_path, "oracle")) as server:
        answers = generate(server)
        oracle.write_text(json.dumps([p + a["output_ids"] for p, a in zip(prompts(), answers, strict=True)]))
        assert server.post("/flush_cache").status_code == 200
        accepting = generate(server)
        allocation, found = allocated(server), sizes(server)
    for prompt, answer, again in zip(prompts(), answers, accepting, strict=True):
        assert_greedy(target, prompt, answer["output_ids"])
        assert again["output_ids"] == answer["output_ids"]
    assert 0 < 2 * blocks(accepting) < blocks(answers)
    assert_as_estimated(estimated(*pair.values(), *flags, *found), allocation)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_as_printed_serves(name: str, tmp_path: Path) -> None:
    printed = card(name)
    build(name, tmp_path)
    arguments = printed.arguments_for(tmp_path / "target", tmp_path / "drafter")
    with running(tmp_path, *arguments, **printed.environment) as server:
        assert_served_here(generate(server), server)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_plain_sglang_refuses_the_command(name: str) -> None:
    printed = card(name)
    status, output = run_to_exit(*printed.arguments, SGLANG_PLUGINS="none", **printed.environment)
    assert status == 2, output
    assert PLAIN_SGLANG_SAYS[name] in output
