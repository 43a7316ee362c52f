"""Allowed outcomes of an input: success, a DFlashError that a terminal can show, or an exit with a usage error."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from time import process_time
from typing import Any

import sglang_dflash
from sglang_dflash.errors import MAX_CHARACTERS, DFlashError

SECONDS, MEMORY = 5.0, 8 << 20  # CPU time; bytes, not counting torch's tensors
FORBIDDEN = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "socket.connect", "pickle.find_class"}
# A call may import modules: the interpreter's files and the package's may be opened.
LIBRARIES = tuple(map(os.path.realpath, (*sysconfig.get_paths().values(), Path(sglang_dflash.__file__).parents[1])))

_watched: tuple[str, list[str]] | None = None


@contextmanager
def judged(folder: Path | str = os.devnull, *, refuse: bool = False) -> Iterator[None]:
    """Fail unless the block ends in one of these ways, in time, and opens files in ``folder`` only.

    Args:
        refuse: whether the block must end in an error.
    """
    global _watched
    touched: list[str] = []
    _watched, began, refusal = (os.path.realpath(folder) + os.sep, touched), process_time(), ""
    tracemalloc.start()
    try:
        with redirect_stderr(io.StringIO()):  # argparse's usage
            yield
    except DFlashError as error:
        refusal = str(error)
    except SystemExit as stopped:
        assert stopped.code == 2
        refusal = "usage"
    finally:
        _watched, (_, peak) = None, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Nothing in the text can drive a terminal, forge a line of a log or fill it.
    assert refusal.isprintable() and refusal.count("Fix: ") < 2 and len(refusal) < 20 * MAX_CHARACTERS, ascii(refusal)
    assert not touched and process_time() - began < SECONDS and peak < MEMORY, (touched, peak)
    assert refusal or not refuse, "accepted"


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    folder, touched = _watched
    if name in FORBIDDEN:
        touched.append(name)
    elif name == "open" and isinstance(arguments[0], str | bytes):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith((folder, *LIBRARIES)):
            touched.append(path)


sys.addaudithook(_audit)  # cannot be removed again
