"""The plugin that switches a running server's width: every policy hears of its own steps and of no other's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PLUGIN = Path(__file__).parents[1] / "plugin"


class Learner:
    widths, max_width = (1, 4, 16), 16

    def __init__(self) -> None:
        self.observed: list[tuple[int, list[int]]] = []
        self.times: list[float] = []

    def width(self, batch_size: int, context: int = 0) -> int:
        return 4

    def observe(self, width: int, accept_lens: Sequence[int]) -> None:
        self.observed.append((width, list(accept_lens)))

    def observe_time(self, batch_size: int, width: int, context: int, milliseconds: float) -> None:
        self.times.append(milliseconds)


@pytest.fixture
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Learner, Callable[[str], None]]:
    """A worker whose policy is switched, the policy that it had, and what writes to the file and prefills."""
    monkeypatch.syspath_prepend(PLUGIN)
    from dflash_test_plugin import width_switch

    monkeypatch.setenv(width_switch.VARIABLE, str(tmp_path / "width"))
    own = Learner()
    worker = SimpleNamespace(width_policy=own)

    def prefill(text: str) -> None:
        (tmp_path / "width").write_text(text)
        width_switch.follow_file(worker, "batch")

    width_switch.follow_file(worker, "batch")  # before there is a file
    return worker, own, prefill


def test_without_a_file_it_is_the_servers_own(switch: Any) -> None:
    worker, own, _ = switch
    policy = worker.width_policy
    assert policy.width(2, 100) == 4
    policy.observe(4, [1, 2], [4, 4])
    assert own.observed == [(4, [1, 2])]


def test_the_file_chooses_at_a_prefill(switch: Any) -> None:
    worker, _, prefill = switch
    chosen = []
    for text in ("16", "1\n", "own", "2"):
        prefill(text)
        chosen.append(worker.width_policy.width(1))
    assert chosen == [16, 1, 4, 2]
    assert (worker.width_policy.widths, worker.width_policy.max_width) == ((1, 4, 16), 16)


def test_a_step_that_ends_after_the_switch_belongs_to_who_asked_for_it(switch: Any) -> None:
    worker, own, prefill = switch
    policy = worker.width_policy
    prefill("own")
    policy.width(1)
    prefill("16")
    policy.width(1)
    policy.observe(4, [3])  # of the step before the switch
    prefill("own")
    policy.observe(16, [9])
    assert own.observed == [(4, [3])]


def test_times_are_the_chosen_policys(switch: Any) -> None:
    worker, own, prefill = switch
    prefill("16")
    worker.width_policy.observe_time(1, 16, 100, 5.0)
    prefill("own")
    worker.width_policy.observe_time(1, 4, 100, 3.0)
    assert own.times == [3.0]
