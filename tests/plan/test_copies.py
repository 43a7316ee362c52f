"""Whether blocks are copied: the switch, the width file, and what happens without either."""

from __future__ import annotations

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.copies import SWITCH, copies_asked_for
from sglang_dflash.width.config import WidthConfig


@pytest.mark.parametrize(
    ("switch", "widths", "copied"),
    [
        (None, None, False),
        (None, WidthConfig(), True),
        (None, WidthConfig("fixed"), False),
        (None, WidthConfig("random"), False),
        (None, WidthConfig("fixed", copies=True), True),
        (None, WidthConfig(copies=False), False),
        ("1", None, True),
        ("0", WidthConfig(), False),
        ("1", WidthConfig("fixed", copies=True), True),
    ],
)
def test_they_come_with_adaptive_widths_unless_somebody_says_otherwise(
    switch: str | None, widths: WidthConfig | None, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    assert copies_asked_for(widths) is copied


@pytest.mark.parametrize(("switch", "widths"), [("yes", None), ("1", WidthConfig(copies=False))])
def test_a_switch_that_cannot_be_followed_is_refused(
    switch: str, widths: WidthConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    with pytest.raises(DFlashError, match=SWITCH):
        copies_asked_for(widths)
