"""Up to the target's last position, also with a drafter of a shorter context: the target's own greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.plan.settings import COPIES_SWITCH as SWITCH
from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.train.hf import load_model
from tests.support.checkpoints import assert_greedy
from tests.support.generation import assert_nothing_leaked, generate_all
from tests.support.pair_servers import changed_drafter, dflash_server, strict, with_plugin
from tests.support.prompts import corpus

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAIR, CONTEXT = "tiny-hybrid", 192


# The second is the published drafters' case; the first asks for more, and of the table both ask the same.
@pytest.mark.parametrize("own_context", [64, CONTEXT])
def test_generations_reach_the_end_of_the_targets_context(own_context: int, tmp_path: Path) -> None:
    drafter = changed_drafter(PAIR, tmp_path, max_position_embeddings=own_context)
    # Also one as long as SGLang takes.
    prompts = [prompt[: CONTEXT - 7 - 9 * i] for i, prompt in enumerate(corpus(PAIR, 12))]
    sampling = {"ignore_eos": True, "max_new_tokens": None}
    limit = ("--context-length", str(CONTEXT))
    histories = {SWITCH: "1", **with_plugin(tmp_path, "history")} if own_context == CONTEXT else {}
    with dflash_server(PAIR, tmp_path, *limit, drafter=drafter, **{**strict(), **histories}) as server:
        answers = generate_all(server, prompts, concurrency=4, sampling_params=sampling)
        assert_nothing_leaked(server)
    target = load_model(target_path(PAIR))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(target, prompt, answer.tokens)
        assert answer.meta["finish_reason"]["type"] == "length"
        assert answer.meta["prompt_tokens"] + answer.meta["completion_tokens"] == CONTEXT - 2  # all that SGLang allows
