"""Each published card's command line, as printed but for the models' paths, on a shrunk pair of its structure."""

from __future__ import annotations

import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from checkpoints import assert_greedy
from serving import Server, running
from tiny_cards import VOCAB, build

from sglang_dflash.check.options import parse
from sglang_dflash.check.report import preflight
from sglang_dflash.worker.identity import SERVER_INFO_KEY
from tests.cards import NAMES, card

NEW_TOKENS = 24
FLOAT32 = ("--dtype", "float32")  # the one flag added where tokens are compared: SGLang's auto would take float16
RICHEST = "Qwen3.5-4B"  # the card with the most flags, and an exported variable


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [draw.choices(range(10, VOCAB - 300), k=length) for length in (3, 16, 17, 40, 64, 65, 130, 200)]


def generate(server: Server) -> list[dict[str, Any]]:
    """Eight requests that arrive together."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    response = server.post("/generate", {"input_ids": prompts(), "sampling_params": sampling})
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
    with running(tmp_path, *flags, **card(name).environment) as server:
        answers = generate(server)
        info = server.get("/server_info").json()
        log = server.log
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert answer["meta_info"]["spec_verify_ct"] > 0
        assert_greedy(target, prompt, answer["output_ids"])
    assert_memory(flags, pair, info, log)


def assert_memory(flags: list[str], pair: dict[str, Path], info: dict[str, Any], log: str) -> None:
    """``check`` for the sizes that this machine led to: every pool within 3 % of what the server allocated."""
    slots = re.search(r"max_mamba_cache_size: (\d+)", log)
    assert slots is not None
    state = info["internal_states"][0]
    sizes = [
        *("--max-total-tokens", str(info["max_total_num_tokens"])),
        *("--max-mamba-cache-size", slots[1]),
        *("--max-running-requests", str(state["effective_max_running_requests_per_dp"])),
    ]
    args, _, _ = parse([*flags, *sizes], target=str(pair["target"]), drafter=str(pair["drafter"]))
    report = preflight(args, device=None, memory_gib=64)
    assert report.memory is not None, report.findings
    estimated = {**asdict(report.memory.fit), **asdict(report.memory.demand)} | {
        pool: getattr(report.memory.fit, pool) for pool in ("target_kv", "draft_kv")
    }
    for pool, allocated in state[SERVER_INFO_KEY]["memory_bytes"].items():
        assert estimated[pool] == pytest.approx(allocated, rel=0.03), pool


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_as_printed_serves(name: str, tmp_path: Path) -> None:
    printed = card(name)
    build(name, tmp_path)
    arguments = printed.arguments_for(tmp_path / "target", tmp_path / "drafter")
    with running(tmp_path, *arguments, **printed.environment) as server:
        answers = generate(server)
        state = server.get("/server_info").json()["internal_states"][0]
    assert SERVER_INFO_KEY in state, "another worker served"
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)
