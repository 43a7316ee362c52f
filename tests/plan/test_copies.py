"""Whether blocks are copied: the switch, the width file, and what happens without either."""

from __future__ import annotations

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.plan import chooses_copies
from sglang_dflash.plan.settings import COPIES_SWITCH as SWITCH
from sglang_dflash.plan.settings import Settings
from sglang_dflash.plan.widths import WidthConfig


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
    switch: str | None, widths: WidthConfig | None, copied: bool
) -> None:
    environ = {} if switch is None else {SWITCH: switch}
    assert chooses_copies(Settings.of(Settings(), environ), widths) is copied


@pytest.mark.parametrize(("switch", "widths"), [("yes", None), ("1", WidthConfig(copies=False))])
def test_a_switch_that_cannot_be_followed_is_refused(switch: str, widths: WidthConfig | None) -> None:
    settings = Settings.of(Settings(), {SWITCH: switch})
    with pytest.raises(DFlashError, match=SWITCH):
        settings.validate()
        chooses_copies(settings, widths)
