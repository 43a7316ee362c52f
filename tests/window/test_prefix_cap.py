"""How much of a prompt the prefix cache may serve under a draft window."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from sglang_dflash.window.hooks import cap_prefix
from sglang_dflash.window.size import DraftWindow
from tests.support.plan import serve

pytestmark = pytest.mark.sglang

WINDOW = 64


@pytest.mark.parametrize(
    ("longest", "input_len", "reusable"),
    [
        (499, 500, 436),  # the last 64 tokens go through the prefill and so into the ring
        (300, 500, 300),  # SGLang's own bound is the tighter one
        (64, 65, 1),
        (63, 64, 0),
        (9, 10, 0),  # shorter than the window
    ],
)
def test_a_hit_leaves_the_windows_tokens_to_the_prefill(
    longest: int, input_len: int, reusable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, window=DraftWindow(WINDOW, block=16, page=1))
    assert cap_prefix(longest, None, input_len) == reusable


def test_without_a_window_the_whole_hit_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    assert cap_prefix(499, None, 500) == 499
