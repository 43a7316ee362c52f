"""Three rounds of an online trainer: text stays plain decoding's, and the accept length follows both models."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash_lab.pairs import NOISY
from sglang_dflash_lab.train.rollouts import SERVER, Loop
from tests.support.servers import dflash_server, plain_server, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"


@pytest.mark.slow
def test_the_loop_that_trainers_run(tmp_path: Path) -> None:
    with (
        plain_server(PAIR, tmp_path, base=SERVER) as plain,
        dflash_server(PAIR, tmp_path, base=SERVER, drafter=NOISY) as server,
    ):
        loop, lengths = Loop(PAIR, [server.url, plain.url]), list[float]()

        def roll_out() -> None:
            seed = len(lengths)
            found, expected = loop.roll_out(seed), loop.roll_out(seed, plain.url)
            assert found.tokens == expected.tokens
            assert found.log_probabilities == expected.log_probabilities
            assert found.accept_length is not None and expected.accept_length is None
            lengths.append(found.accept_length)
            losses.append(loop.train(found))

        losses = list[float]()
        for number in range(3):
            roll_out()
            loop.update("draft", f"round-{number}")
        roll_out()
        loop.move_target(0)
        loop.update("target", "moved")
        roll_out()  # the drafter is as in the round before
        assert worker_info(server)["weight_versions"] == {"target": "moved", "draft": "round-2"}
        loop.update("draft", "moved")
        roll_out()
        print(f"accept lengths {lengths}, losses {losses}")
        # Each round has other seeds, and so other texts: a single step of training does not always show.
        assert lengths[0] < lengths[3] > lengths[4] < lengths[5]
