"""Each published card's command line, as printed but for the models' paths, on a shrunk pair of its structure."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.hooks.server_info import SERVER_INFO_KEY
from tests.support.cards import NAMES, PLAIN_SGLANG_SAYS, card
from tests.support.checkpoints import assert_greedy
from tests.support.memory import allocated, assert_as_estimated, estimated
from tests.support.pair_servers import with_plugin
from tests.support.servers import Server, run_to_exit, running
from tests.support.shrunk_cards import VOCAB, build

NEW_TOKENS = 48
# The one flag added where tokens are compared: in the published bfloat16 a block's forward rounds otherwise than a
# token's, with any worker.
FLOAT32 = ("--dtype", "float32")
RICHEST = "Qwen3.5-4B"  # the card with the most flags, and an exported variable


def prompts() -> list[list[int]]:
    """Random tokens; the longest answer crosses SGLang's track boundary of recurrent states, at 256 tokens."""
    draw = random.Random(0)
    return [draw.choices(range(10, VOCAB - 300), k=length) for length in (3, 16, 17, 40, 64, 65, 130, 220)]


def request() -> dict[str, Any]:
    """Eight requests that arrive together."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": prompts(), "sampling_params": sampling}


def generate(server: Server) -> list[dict[str, Any]]:
    response = server.post("/generate", request())
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()
    assert [len(answer["output_ids"]) for answer in answers] == [NEW_TOKENS] * 8
    return answers


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


def assert_served_here(answers: list[dict[str, Any]], server: Server) -> None:
    """It was this package's worker that drafted and verified, in the checkpoint's own dtype."""
    assert "serves DFLASH" in server.log
    info = server.get("/server_info").json()
    assert SERVER_INFO_KEY in info["internal_states"][0], "another worker served"
    assert "KV Cache is allocated. dtype: torch.bfloat16" in server.log
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_plain_sglang_refuses_the_command(name: str) -> None:
    printed = card(name)
    status, output = run_to_exit(*printed.arguments, SGLANG_PLUGINS="none", **printed.environment)
    assert status == 2, output
    assert PLAIN_SGLANG_SAYS[name] in output
