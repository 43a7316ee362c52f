"""A DFlash2 drafter drafts the same blocks under SGLang's own worker, and as many of their tokens are accepted.

In float32 only: SGLang's scores of the candidates are rounded otherwise in bfloat16.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tests.support.generation import Answer, generate
from tests.support.prompts import corpus
from tests.support.servers import draft_arguments, recorded_blocks, running, target_arguments, with_plugin

PAIR, NEW_TOKENS = "tiny-hybrid", 96
PEERS = Path(__file__).parents[2] / "lab/sglang_dflash_lab/measure/peers"
COMPARED = {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(PEERS)}
Blocks = list[tuple[int, list[int]]]


def served(folder: Path, prompts: list[list[int]], block: int, **environment: str) -> tuple[list[Answer], list[Blocks]]:
    """Return the answers, and position and tokens of each block that was verified for them."""
    folder.mkdir()
    command = (*target_arguments(PAIR), *draft_arguments(PAIR, "dflash2", block))
    plugin = with_plugin(folder, "drafts", "sglangs_drafts")
    plugin["PYTHONPATH"] += os.pathsep + environment.pop("PYTHONPATH", "")
    with running(folder, *command, **plugin, **environment) as server:
        ours = "sglang_dflash" in server.get("/server_info").json()["internal_states"][0]
        assert ours != ("SGLANG_DFLASH" in environment)
        answers = [generate(server, prompt, NEW_TOKENS) for prompt in prompts]
    # With overlap a block may follow a finished request. The next request begins at an earlier position.
    lines, found = recorded_blocks(folder), list[Blocks]()
    for (before, _), line in itertools.pairwise([(1 << 30, []), *lines]):
        if line[0] < before:
            found.append([])
        found[-1].append(line)
    return answers, [blocks[: a.meta["spec_verify_ct"]] for a, blocks in zip(answers, found, strict=True)]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("block", [16, 5])
def test_blocks_of_a_dflash2_drafter_equal_those_of_sglangs_own_worker(block: int, tmp_path: Path) -> None:
    prompts = sorted(corpus(PAIR, 6, seed=4), key=len, reverse=True)
    answers, blocks = served(tmp_path / "ours", prompts, block)
    theirs, expected = served(tmp_path / "theirs", prompts, block, SGLANG_DFLASH="builtin", **COMPARED)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in theirs]
    assert blocks == expected  # the positions show how many tokens of the block before were accepted
