"""What the fuzz run calls a finding."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_dflash.errors import DFlashError
from tests.fuzz import judge
from tests.fuzz.judge import Judge


def fail(value: object) -> None:
    raise KeyError(value)


def spin(_: object) -> None:
    while True:
        pass


def refuse(value: object) -> None:
    raise DFlashError("x", expected="y", remedy=str(value))


def leave(code: int) -> Callable[[object], None]:
    return lambda _: sys.exit(code)


def connect(_: object) -> None:
    with socket.socket() as connection:
        connection.settimeout(0.01)
        connection.connect_ex(("127.0.0.1", 9))


def judged(call: Callable[[object], object], value: object = 0, folder: Path | None = None) -> list[str]:
    look = Judge()
    look.look(call, value, folder)
    assert look.inputs == 1
    return [finding.what for finding in look.findings]


@pytest.mark.parametrize("call", [len, refuse, leave(2)])
def test_what_is_allowed(call: Callable[[object], object]) -> None:
    assert judged(call, "value") == []


@pytest.mark.parametrize(
    ("call", "value", "what"),
    [
        (fail, 1, "KeyError"),
        (refuse, "\x1b[2J", "an error's text that no terminal can show"),
        (refuse, "\ud800", "an error's text that no terminal can show"),
        (refuse, "x" * 20_000, "an error's text of more than 10000 characters"),
        (leave(1), 0, "exit with 1"),
        (connect, 0, "socket.connect"),
        (lambda _: subprocess.run(["true"], check=True), 0, "subprocess.Popen"),
        (pickle.loads, pickle.dumps(Path), "pickle.find_class"),
    ],
)
def test_what_is_a_finding(call: Callable[[object], object], value: object, what: str) -> None:
    assert judged(call, value) == [what]


def test_an_input_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "CPU_SECONDS", 0.05)
    assert judged(spin) == ["more than 0.05 s"]


def test_only_the_folder_may_be_opened(tmp_path: Path) -> None:
    own = tmp_path / "model"
    own.mkdir()
    for path in (own / "a", tmp_path / "b"):
        path.write_text("")
    (own / "link").symlink_to("../b")
    assert judged(lambda _: (own / "a").read_text(), folder=own) == []
    for outside in (tmp_path / "b", own / ".." / "b", own / "link"):
        assert judged(lambda _, path=outside: path.read_text(), folder=own) == ["a file outside the model's folder"]


def test_a_finding_is_told_once_with_its_shortest_input() -> None:
    look = Judge()
    for value in ("long", "s", "longer"):
        look.look(fail, value)
    (finding,) = look.findings
    assert (finding.example, finding.count) == ("'s'", 3)


def test_memory_is_limited() -> None:
    """In a process of its own, as there is no way back."""
    program = "from tests.fuzz.judge import limit_memory; limit_memory(); bytearray({})"
    for size, status in ((1 << 20, 0), (1 << 30, 1)):
        done = subprocess.run([sys.executable, "-c", program.format(size)], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert "MemoryError" in done.stderr
