"""What may come of an input, and what is a finding.

Allowed are success, a :class:`DFlashError` whose text a terminal can show, and an exit with a usage error. A finding is
any other exception, more CPU time or memory than a small file can be worth, a file opened outside the model's folder, a
process started, a connection made or an object unpickled.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sglang_dflash
from sglang_dflash.errors import DFlashError

CPU_SECONDS = 5.0  # of one input; the slowest honest one takes a hundredth
HEADROOM = 512 << 20  # bytes of address space beyond what the process has when it starts
LONGEST_TEXT = 10_000  # characters of an error
_PACKAGE = Path(sglang_dflash.__file__).parent
_FORBIDDEN = {"subprocess.Popen", "os.system", "os.exec", "socket.connect", "pickle.find_class"}
# The interpreter's own files: an import may happen while an input is looked at.
_LIBRARIES = tuple({os.path.realpath(each) for each in (*sysconfig.get_paths().values(), _PACKAGE.parent)})


class Stuck(BaseException):
    """An input took more than ``CPU_SECONDS``; no handler of ordinary errors takes it."""


@dataclass(frozen=True)
class Finding:
    """One kind of misbehaviour: the shortest of its inputs, and how often it was seen."""

    what: str
    where: str
    example: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.what} at {self.where}, {self.count} times, for example {self.example}"


@dataclass
class Judge:
    """Looks at one input after the other.

    Attributes:
        inputs, refused: how many there were, and of them those that ended in an allowed error.
    """

    inputs: int = 0
    refused: int = 0
    _findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        return list(self._findings.values())

    def look(self, call: Callable[[Any], object], value: Any, folder: Path | None = None) -> None:
        """Call with one input.

        Args:
            folder: the only place that may be opened; None for nothing at all.
        """
        self.inputs += 1
        try:
            with _watched(folder) as events, _at_most(CPU_SECONDS):
                call(value)
        except DFlashError as error:
            self.refused += 1
            if problem := _unreadable(str(error)):
                self._note(f"an error's text {problem}", _origin(error), value)
        except SystemExit as stopped:
            self.refused += 1
            if stopped.code != 2:
                self._note(f"exit with {stopped.code}", _origin(stopped), value)
        except Stuck as error:
            self._note(f"more than {CPU_SECONDS:g} s", _origin(error), value)
        except Exception as error:  # noqa: BLE001  what a finding is
            self._note(type(error).__name__, _origin(error), value)
        for event in events:
            self._note(event, "the audit hook", value)

    def _note(self, what: str, where: str, value: Any) -> None:
        example = _short(value)
        known = self._findings.get((what, where))
        if known is not None:
            example = min(known.example, example, key=len)
        self._findings[what, where] = Finding(what, where, example, 1 if known is None else known.count + 1)


def limit_memory() -> None:
    """Let this process have no more than ``HEADROOM`` beyond what it has: an unchecked size fails at once."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, resource.RLIM_INFINITY))


def _unreadable(text: str) -> str | None:
    if len(text) > LONGEST_TEXT:
        return f"of more than {LONGEST_TEXT} characters"
    return None if text.replace("\n", "").isprintable() else "that no terminal can show"


def _origin(error: BaseException) -> str:
    """The innermost line of the package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(_PACKAGE))]
    if not frames:
        return "outside the package"
    return f"{Path(frames[-1].filename).relative_to(_PACKAGE.parent)}:{frames[-1].lineno}"


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-140:]}"


_watch: tuple[str | None, list[str]] | None = None
_hooked = False


@contextmanager
def _watched(folder: Path | None) -> Iterator[list[str]]:
    """What an audit hook says of the block: descriptions of forbidden events."""
    global _watch, _hooked
    if not _hooked:
        sys.addaudithook(_audit)  # for the rest of the process: there is no way to take one off
        _hooked = True
    events: list[str] = []
    _watch = (None if folder is None else os.path.realpath(folder)), events
    try:
        yield events
    finally:
        _watch = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is None:
        return
    folder, events = _watch
    if event in _FORBIDDEN:
        events.append(event)
    elif event == "open" and isinstance(arguments[0], str | bytes):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        inside = folder is not None and path.startswith(f"{folder}/")
        if not inside and not path.startswith(_LIBRARIES):
            events.append("a file outside the model's folder")


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """CPU time, not wall time: a busy machine is no finding, and pytest's own timeout uses the other clock."""

    def stop(*_: object) -> None:
        raise Stuck

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
