"""Moments on the device that runs the steps; nothing waits for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """On an accelerator a moment is an event on its stream, known once the device has come that far."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._events = None if device.type == "cpu" else torch.get_device_module(device)

    def now(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return self._events is None or bool(moment.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Between two moments that have passed."""
        return float(end - start if self._events is None else start.elapsed_time(end) / 1000)
