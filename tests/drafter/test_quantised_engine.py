"""A quantised drafter drafts in a real server what the plain drafter drafts that its numbers stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.generation import Answer, generate_all
from tests.support.pair_servers import dflash_server, plain_server, worker_info
from tests.support.prompts import corpus
from tests.support.quantised import FORMATS, write

PAIR, PROMPTS = "tiny-dense", 8

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The target's own answers."""
    with plain_server(PAIR, tmp_path_factory.mktemp("target")) as server:
        return [answer.tokens for answer in generate_all(server, corpus(PAIR, PROMPTS), 1)]


def answers_of(drafter: Path, tmp_path: Path) -> list[Answer]:
    with dflash_server(PAIR, tmp_path, drafter=drafter, XDG_CACHE_HOME=str(tmp_path / "cache")) as server:
        dequantised = worker_info(server)["drafter"].startswith(str(tmp_path / "cache"))
        assert dequantised == (drafter.name == "quantised")
        return generate_all(server, corpus(PAIR, PROMPTS), 1)


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_as_its_plain_form(name: str, expected: list[list[int]], tmp_path: Path) -> None:
    write(name, tmp_path, PAIR)
    quantised, plain = (answers_of(tmp_path / kind, tmp_path) for kind in ("quantised", "plain"))
    assert [answer.tokens for answer in quantised] == expected
    steps, plain_steps = ([answer.meta["spec_verify_ct"] for answer in answers] for answers in (quantised, plain))
    assert steps == plain_steps
    # Rounding costs little here. Numbers without their factors, or in another order, accept next to nothing.
    assert sum(len(tokens) - 1 for tokens in expected) > 3 * sum(steps)
