"""Routes of experts that a trainer replays (R3): every position's experts are plain decoding's."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash_lab.pairs import target_path
from tests.support.generation import Answer, flush, generate_all
from tests.support.prompts import corpus
from tests.support.servers import RANDOM_WIDTHS, Server, dflash_server, plain_server

PAIR, NEW_TOKENS = "tiny-moe", 60
ROUTES = ("--enable-return-routed-experts",)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def answered(server: Server, stops: list[int], concurrency: int) -> list[Answer]:
    """Send all prompts twice, the second time as prefix hits; every second answer ends at a stop token."""
    flush(server)
    prompts = 2 * corpus(PAIR, 12)

    def body(number: int) -> dict[str, Any]:
        stop = {"stop_token_ids": stops} if number % 2 else {"ignore_eos": True}
        return {"sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, **stop}}

    return generate_all(server, prompts, concurrency, each=body, return_routed_experts=True)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_routes_are_plain_decodings(concurrency: int, tmp_path: Path) -> None:
    config = json.loads((target_path(PAIR) / "config.json").read_text())
    with plain_server(PAIR, tmp_path, *ROUTES) as plain, dflash_server(PAIR, tmp_path, *ROUTES, *RANDOM_WIDTHS) as ours:
        first = answered(plain, [], 8)
        stops = [answer.tokens[len(answer.tokens) // 2] for answer in first[::4]]
        expected, found = (answered(server, stops, concurrency) for server in (plain, ours))
    for answer, theirs in zip(found, expected, strict=True):
        assert answer.tokens == theirs.tokens and answer.meta["finish_reason"] == theirs.meta["finish_reason"]
        rows = answer.meta["prompt_tokens"] + len(answer.tokens) - 1
        routes = base64.b64decode(answer.meta["routed_experts"])
        assert len(routes) == 4 * rows * config["num_hidden_layers"] * config["num_experts_per_tok"]
        assert answer.meta["routed_experts"] == theirs.meta["routed_experts"]
    ends = {answer.meta["finish_reason"]["type"] for answer in found}
    assert ends == {"stop", "length"} and any(answer.meta["cached_tokens"] for answer in found)
    assert sum(answer.meta["spec_verify_ct"] for answer in found) < sum(len(answer.tokens) for answer in found)
