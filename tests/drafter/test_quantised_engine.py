"""In a real server a quantised drafter drafts what the plain drafter with its dequantised weights drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash_lab.pairs import target_path
from tests.support.generation import generate
from tests.support.pair_servers import draft_arguments, target_arguments, worker_info
from tests.support.prompts import corpus
from tests.support.quantised import FORMATS, write
from tests.support.reference_decoder import ReferenceDecoder
from tests.support.servers import running

PAIR, NEW_TOKENS = "tiny-dense", 48

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_as_its_plain_form(name: str, tmp_path: Path) -> None:
    write(name, tmp_path, PAIR)
    reference = ReferenceDecoder.load(target_path(PAIR), tmp_path / "plain")
    steps = tokens = 0
    cache = str(tmp_path / "cache")
    command = (*target_arguments(PAIR), *draft_arguments(PAIR, tmp_path / "quantised"))
    with running(tmp_path, *command, XDG_CACHE_HOME=cache) as server:
        assert worker_info(server)["drafter"].startswith(cache)
        for prompt in corpus(PAIR, 6):
            answer, expected = generate(server, prompt, NEW_TOKENS), reference.decode(prompt, NEW_TOKENS, width=16)
            assert answer.tokens == expected.tokens == reference.plain(prompt, NEW_TOKENS)
            assert answer.meta["spec_verify_ct"] == len(expected.steps)
            steps += len(expected.steps)
            tokens += len(expected.tokens)
    # Rounding costs little here; numbers without their factors, or in another order, accept next to nothing.
    assert tokens > 3 * steps
