"""Greedy DFLASH that copies gives plain decoding's tokens: three drafters, any policy of widths, alone and together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dflash_lab.bench.tasks import load
from tests.support.generation import assert_nothing_leaked, flush, generate_all
from tests.support.pair_servers import RANDOM_WIDTHS, dflash_server, plain_server, worker_info
from tests.support.prompts import corpus, message_ids, random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

PAIR, NEW_TOKENS = "tiny-hybrid", 64
ASKED = {"edit-json": 30, "edit-code": 30, "edit-chat": 30, "repeat": 30, "quote": 8}
# Flags, and the widest block: twice the drafter's where widths differ.
POLICIES = {"fixed": ((), 16), "adaptive": (("--speculative-adaptive",), 32), "random": (RANDOM_WIDTHS, 32)}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """What repeats itself, and what need not: known conversations, and noise, after which a model loops."""
    asked = [messages for task, count in ASKED.items() for messages in load(task, count, seed=1)]
    return [*message_ids(PAIR, asked), *corpus(PAIR, 24, seed=1), *random_prompts(PAIR, 18)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[int]]]:
    with plain_server(PAIR, tmp_path_factory.mktemp("plain")) as server:
        yield [answer.tokens for answer in generate_all(server, prompts, 8, NEW_TOKENS)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", ["noisy", "weak", "good"])
def test_what_is_copied_is_verified(
    drafter: str, policy: str, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    flags, block = POLICIES[policy]
    with dflash_server(PAIR, tmp_path, *flags, drafter=drafter, block=block, SGLANG_DFLASH_COPIES="1") as server:
        for concurrency in (8, 1):
            flush(server)
            answers = generate_all(server, prompts, concurrency, NEW_TOKENS)
            wrong = [place for place, answer in enumerate(answers) if answer.tokens != expected[place]]
            assert not wrong, f"{len(wrong)} of {len(prompts)} differ at concurrency {concurrency}: {wrong[:9]}"
        assert_nothing_leaked(server)
        info = worker_info(server)
        assert sum(info["copied_blocks_by_match_length"].values()) > len(prompts), "next to nothing was copied"
