"""Up to the target's last position, also with a drafter of a shorter context: plain decoding's text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dflash.pairs import drafter_path
from tests.support.generation import Answer, assert_nothing_leaked, generate_all
from tests.support.pair_servers import STRICT, draft_arguments, plain_server, target_arguments
from tests.support.prompts import corpus
from tests.support.servers import Server, running

pytestmark = pytest.mark.engine

PAIR, CONTEXT = "tiny-hybrid", 192
LIMIT = ("--context-length", str(CONTEXT))


def to_the_limit(server: Server) -> list[Answer]:
    # Also one as long as SGLang takes.
    prompts = [prompt[: CONTEXT - 7 - 9 * i] for i, prompt in enumerate(corpus(PAIR, 12))]
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": None}
    return generate_all(server, prompts, concurrency=4, sampling_params=sampling)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Answer]]:
    with plain_server(PAIR, tmp_path_factory.mktemp("plain"), *LIMIT) as server:
        yield to_the_limit(server)


# The second is the published drafters' case; the first asks for more, and of the table both ask the same.
@pytest.mark.parametrize("own_context", [64, pytest.param(CONTEXT, marks=pytest.mark.slow)])
def test_generations_reach_the_end_of_the_targets_context(
    own_context: int, plain: list[Answer], tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(drafter_path(PAIR, "good"), drafter)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": own_context}))
    speculation = [*draft_arguments(PAIR)]
    speculation[speculation.index(str(drafter_path(PAIR, "good")))] = str(drafter)
    with running(tmp_path, *target_arguments(PAIR), *speculation, *LIMIT, **STRICT) as server:
        found = to_the_limit(server)
        assert_nothing_leaked(server)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
    for answer in found:
        assert answer.meta["finish_reason"]["type"] == "length"
        assert answer.meta["prompt_tokens"] + answer.meta["completion_tokens"] == CONTEXT - 2  # all that SGLang allows
