"""Streams, events and the caching allocator, emulated: in place of those of ``torch.cuda``, on a CPU.

Operators run at once, in the order of the host's program. A stream's vector clock says how much of every other stream
(and of the host) its next operator comes after; :mod:`~tests.rehearsal.streams_watch` compares the clocks of accesses.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

Clock = dict[int, int]
_ids = itertools.count()


def join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class Stream:
    """In place of ``torch.cuda.Stream``; ``seen`` is what its next operator comes after."""

    def __init__(self, *args: Any, name: str = "stream", **options: Any) -> None:
        self.id, self.name = next(_ids), name
        self.seen: Clock = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "synchronize":  # SGLang makes it a no-op where the device is a CPU
            super().__setattr__(name, value)

    def launch(self) -> None:
        """The host enters an operator."""
        join(self.seen, HOST.seen)
        self.seen[self.id] = self.seen.get(self.id, 0) + 1

    def wait_stream(self, other: Stream) -> None:
        join(self.seen, other.seen)

    def wait_event(self, event: Event) -> None:
        join(self.seen, event.seen)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        join(HOST.seen, self.seen)

    def query(self) -> bool:
        self.synchronize()
        return True


class Event:
    """In place of ``torch.cuda.Event``. One that was not recorded makes nobody wait, as on CUDA."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        join(stream.seen, HOST.seen)
        self.seen = dict(stream.seen)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        join(HOST.seen, self.seen)

    def query(self) -> bool:
        self.synchronize()  # the host may act on it
        return True


HOST, DEFAULT = Stream(name="host"), Stream(name="default")
_current = DEFAULT


def current_stream(device: Any = None) -> Stream:
    return _current


class StreamContext:
    """In place of ``torch.cuda.StreamContext``; may be entered again."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._outer = stream, [DEFAULT][:0]

    def __enter__(self) -> None:
        global _current
        self._outer.append(_current)
        _current = self._stream or _current

    def __exit__(self, *error: Any) -> None:
        global _current
        _current = self._outer.pop()


def install() -> None:
    """``torch.cpu`` has streams and events from now on."""
    for name, value in (("Stream", Stream), ("Event", Event), ("StreamContext", StreamContext)):
        setattr(torch.cpu, name, value)
    torch.cpu.stream, torch.cpu.current_stream = StreamContext, current_stream
