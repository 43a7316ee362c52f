"""The lines of SGLang for which the no-sync guard is lifted are still there."""

from __future__ import annotations

import inspect

import pytest

from sglang_dflash.upstream import SYMBOLS
from sglang_dflash.worker.no_sync import EXCUSED

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")


@pytest.mark.parametrize("name", EXCUSED)
def test_an_excused_function_still_has_the_line_that_waits(name: str) -> None:
    line, _ = EXCUSED[name]
    function = inspect.unwrap(SYMBOLS[name].resolve())
    assert line in inspect.getsource(function), f"{name} does not wait there any more: take it out of EXCUSED"
