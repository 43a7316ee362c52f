"""A real server counts what may be why drafts are rejected; ``test_width_engine.py`` has the cause in the log."""

from __future__ import annotations

import pytest

from sglang_dflash_lab.pairs.corpus import prompts
from tests.support.generation import generate_all
from tests.support.pair_servers import worker_info
from tests.support.prompts import chat_ids, random_prompts, schema_of
from tests.support.servers import Server

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"


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
    found = worker_info(dflash_hybrid)["drafting"]
    assert set(found["traits"]) >= {"sampling", "grammar", "thinking on", "thinking off", "no chat template"}
    for trait in found["traits"].values():
        assert 0 < trait["share"] < 1
    assert found["accept_length"] > 1 and found["card"] is None
