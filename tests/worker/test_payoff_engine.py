"""Real servers find why drafts are rejected, and log it once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.causes import FIXES
from sglang_dflash_lab.pairs.corpus import prompts
from tests.support.generation import generate_all
from tests.support.pair_servers import dflash_server, worker_info
from tests.support.prompts import chat_ids, corpus, random_prompts, schema_of
from tests.support.servers import Server

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
USERS = 8


def drafting(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = worker_info(server)["drafting"]
    return found


def gauge(server: Server) -> float:
    (value,) = re.findall(r"^sglang_dflash:drafting_pays\{.*\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return float(value)


def lines(server: Server) -> list[str]:
    """Log lines about drafting, in order."""
    return re.findall(r"DFLASH: (drafting .*)", server.log)


def test_every_trait_of_a_request_is_counted(dflash_hybrid: Server) -> None:
    asked = prompts("json", n=4, seed=11)
    thinking = chat_ids(PAIR, asked, enable_thinking=True)
    plain = chat_ids(PAIR, asked)
    for inputs, sampling in (
        (plain, {"temperature": 1.0}),
        (plain, {"json_schema": schema_of(asked[0])}),
        (thinking, {}),
        (random_prompts(PAIR, 4), {"ignore_eos": True}),
    ):
        generate_all(dflash_hybrid, inputs, 4, 48, sampling_params=sampling)
    found = drafting(dflash_hybrid)
    assert set(found["traits"]) >= {"sampling", "grammar", "thinking on", "thinking off", "no chat template"}
    for trait in found["traits"].values():
        assert 0 < trait["share"] < 1
    assert found["accept_length"] > 1 and found["card"] is None


@pytest.fixture
def good(tmp_path: Path) -> Iterator[Server]:
    with dflash_server(PAIR, tmp_path, drafter="noisy") as server:
        yield server


@pytest.mark.slow
def test_raw_prompts_are_named_and_a_recovery_is_logged(good: Server) -> None:
    """With a fixed width, the accept length alone decides."""
    sampled = {"temperature": 1.0}
    generate_all(good, corpus(PAIR, 24), USERS, 96)
    generate_all(good, corpus(PAIR, 24, 1), USERS, 96, sampling_params=sampled)
    assert lines(good) == [] and drafting(good)["pays"] is not False and gauge(good) == 1
    hot = {"temperature": 2.0, "ignore_eos": True}
    for _ in range(2):
        generate_all(good, random_prompts(PAIR, 48), USERS, 96, sampling_params=hot)
    (said,) = lines(good)
    assert re.match(r"drafting does not pay: accept length 1\.\d\d .*cause: no chat template \(\d\d% of", said)
    assert FIXES["no chat template"] in said
    found = drafting(good)
    assert found["pays"] is False and gauge(good) == 0 and found["causes"][0]["cause"] == "no chat template"
    generate_all(good, corpus(PAIR, 48, 2), USERS, 96)
    assert lines(good)[1:] == [lines(good)[-1]] and lines(good)[-1].startswith("drafting pays again: accept length")
    assert drafting(good)["pays"] and gauge(good) == 1 and drafting(good)["causes"] == []
