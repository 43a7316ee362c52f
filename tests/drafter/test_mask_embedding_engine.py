"""A drafter's mask embedding changes its drafts and never the target's output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from sglang_dflash_lab.pairs import drafter_path
from tests.support.generation import generate_all
from tests.support.pair_servers import dflash_server, draft_arguments, target_arguments
from tests.support.prompts import corpus
from tests.support.servers import running

PAIR = "tiny-dense"

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_another_mask_embedding_changes_drafts_and_no_output(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(drafter_path(PAIR), drafter)
    config = json.loads((drafter / "config.json").read_text())
    noise = 100 * torch.randn(config["hidden_size"], generator=torch.Generator().manual_seed(0))
    token_id = config["dflash_config"]["mask_token_id"]
    torch.save({"embedding": noise, "mask_token_id": token_id}, drafter / "mask_embedding.pt")

    inputs = corpus(PAIR, 4)
    with dflash_server(PAIR, tmp_path) as server:
        expected = generate_all(server, inputs, 4)
    spoilt = (*target_arguments(PAIR), *draft_arguments(PAIR), "--speculative-draft-model-path", str(drafter))
    with running(tmp_path, *spoilt) as server:
        answers = generate_all(server, inputs, 4)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    length, spoilt_length = (
        sum(answer.meta["spec_accept_length"] for answer in every) / len(every) for every in (expected, answers)
    )
    assert spoilt_length < length / 2
