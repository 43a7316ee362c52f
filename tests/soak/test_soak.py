"""A short soak (``make soak`` is the long one): what tokens, pools and health say after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.__main__ import soak

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LONG_RUNS_ALONE_SHOW = ("memory is level", "it ends as fast as it began", "the server was short of K/V")


@pytest.mark.parametrize("drafter", ["noisy", "dflash2"])
def test_every_promise_holds_after_a_few_bursts(drafter: str, tmp_path: Path) -> None:
    found = soak(120, tmp_path, entries=48, drafter=drafter)
    broken = [promise for promise in found if not promise.held and promise.what not in LONG_RUNS_ALONE_SHOW]
    assert not broken, broken
    assert "every answer is the reference's" in (tmp_path / "soak.md").read_text()
