"""One log line tells why the drafter rests."""

from __future__ import annotations

import logging

import pytest

from sglang_dflash.width import Pause
from sglang_dflash.worker.observe import pauses
from sglang_dflash.worker.observe.pauses import PauseLog

PAUSE = Pause(2, 0.2, 1.2, 1.5)


def test_a_pause_is_told_once_and_the_next_one_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    log, now = PauseLog(True), 0.0
    monkeypatch.setattr(pauses.time, "monotonic", lambda: now)
    for pause in (None, PAUSE, PAUSE, None, Pause(2, 0.3, 1.3, 1.5)):
        log.tell(pause)
    assert len(caplog.records) == 1
    for part in ("a block of 2", "20% of first drafts", "another drafter", "thinking switch"):
        assert part in caplog.text
    now = pauses.QUIET_SECONDS
    log.tell(None)
    log.tell(PAUSE)
    assert len(caplog.records) == 2


def test_the_other_ranks_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    PauseLog(False).tell(PAUSE)
    assert not caplog.records
