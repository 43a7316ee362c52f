"""Whether drafting pays, and its causes; each change is logged once."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")


from sglang_dflash.causes import ENOUGH, FIXES
from sglang_dflash.features.payoff import RECENT, Payoff, known_causes
from sglang_dflash.step.flight import Finished
from sglang_dflash.width import WidthPolicy

pytestmark = pytest.mark.sglang

FIXED = WidthPolicy(16)


def request(finished: bool = False) -> Any:
    return SimpleNamespace(finished_reason=object() if finished else None)


class Server:
    """A judgement, steps for it to count, and the lines that it logs."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "sglang_dflash")
        self._records, self.judge = caplog, Payoff({})

    def serve(self, length: int, steps: int = 100, width: int = 16, broken: int = 0, *, finished: bool = False) -> None:
        """Some steps of eight requests."""
        requests = tuple(request(finished) for _ in range(8))
        for _ in range(steps):
            self.judge.count(Finished(width, requests, (), [length] * 8), FIXED, broken)

    def section(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(self.judge.section(FIXED)))
        return found

    def lines(self) -> list[str]:
        """Lines logged since the last call."""
        found = [f"{record.levelname} {record.getMessage()}" for record in self._records.records]
        self._records.clear()
        return found


@pytest.fixture
def server(caplog: pytest.LogCaptureFixture) -> Server:
    return Server(caplog)


def test_the_log_names_causes_and_the_command_that_measures_them(server: Server) -> None:
    server.serve(6)
    assert server.section()["pays"] and server.section()["causes"] == [] and server.lines() == []
    server.serve(1, 1000)
    (line,) = server.lines()
    assert line.startswith("WARNING DFLASH: drafting does not pay: accept length 1.")
    assert "(one user gains from 1.5). " in line
    assert f"Possible cause: drafter. Fix: {FIXES['drafter']}" in line and "`sglang-dflash diagnose URL`" in line
    server.serve(6)
    (line,) = server.lines()
    assert line.startswith("INFO DFLASH: drafting pays again: accept length ")


def test_each_change_is_logged_once(server: Server) -> None:
    server.serve(1, ENOUGH // 8 - 1)
    assert server.section()["pays"] is None and server.lines() == []
    for length, levels in ((1, ["WARNING"]), (6, ["INFO"]), (1, ["WARNING"])):
        server.serve(length, 1000)
        assert [line.split()[0] for line in server.lines()] == levels
        server.serve(length, 1000, broken=1)
        assert server.lines() == []
    server.judge.forget(None)
    server.serve(1, 1000)
    assert server.section()["pays"] is False and server.lines() == [], "it did not pay before either"


def test_plain_steps_copies_and_finished_requests_are_not_counted_and_old_traffic_fades(server: Server) -> None:
    server.serve(1, width=1)
    server.serve(1, finished=True)
    copied = Finished(16, (request(), request()), [1, 4], [9, 9])
    server.judge.count(copied, FIXED, 0)
    assert server.section()["accept_length"] is None
    server.serve(6, RECENT)
    server.serve(3, RECENT)
    assert server.section()["accept_length"] == pytest.approx(3, abs=0.1)


def test_models_show_causes_at_the_start() -> None:
    def known(dtype: torch.dtype = torch.bfloat16, **config: Any) -> dict[str, str | None]:
        settings = SimpleNamespace(**{"quantization": None, **config})
        plan: Any = SimpleNamespace(drafter=settings)
        runner: Any = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype, quantization=None))
        return known_causes(plan, runner, runner)

    assert known() == {} and known(dtype=torch.float16) == {"float16": None}
    assert known(quantization="fp8") == {"quantised drafter": "fp8"}
