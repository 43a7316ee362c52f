"""Short soaks (``make soak`` has the long ones): what tokens, pools and health say after them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.__main__ import soak
from tests.soak.rows import MAIN, ROWS, TRAINER, Row

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

LONG_RUNS_ALONE_SHOW = ("memory is level", "it ends as fast as it began", "K/V was short", "there was")
DFLASH2 = replace(MAIN, name="main, dflash2", drafter="dflash2")


@pytest.mark.parametrize("row", [MAIN, DFLASH2, TRAINER], ids=lambda row: row.name)
def test_every_promise_holds_after_a_few_bursts(row: Row, tmp_path: Path) -> None:
    found = soak(row, tmp_path, share=120 / row.requests, entries=48)
    broken = [promise for promise in found if not promise.held and not promise.what.startswith(LONG_RUNS_ALONE_SHOW)]
    assert not broken, broken
    assert "every answer is the reference's" in (tmp_path / "soak.md").read_text()
    assert len({each.name for each in ROWS}) == len(ROWS)
