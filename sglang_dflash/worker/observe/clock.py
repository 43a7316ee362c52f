"""Moments on the device that runs the steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Nothing waits for a moment: on an accelerator it is an event on its stream, known once the device reached it.

    Attributes:
        now: -> the present moment.
    """

    now: Callable[[], Any]

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._events: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.now = time.perf_counter if self._events is None else self._event

    def _event(self) -> Any:
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return self._events is None or bool(moment.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Between two moments that have passed."""
        return float(end - start if self._events is None else start.elapsed_time(end) / 1000)
