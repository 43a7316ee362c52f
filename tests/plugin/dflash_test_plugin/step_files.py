"""The files of the package that one decode step passes, in the order of their first call."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import sglang_dflash

ROOT = Path(sglang_dflash.__file__).parent
TRACED = 5  # the step: what is built on first use has been built

_steps = 0


def trace(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Around ``DFlashWorker._decode``: follow one step and write its files down, the CPU platform's left out.

    ``entries`` has a file every time that control comes to it from another one.
    """
    global _steps
    _steps += 1
    if _steps != TRACED:
        return original(*args, **options)
    entries: list[str] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "cpu"):
            name = str(path.relative_to(ROOT))
            if not entries or entries[-1] != name:
                entries.append(name)

    sys.setprofile(follow)
    try:
        return original(*args, **options)
    finally:
        sys.setprofile(None)
        Path(os.environ["SGLANG_DFLASH_TEST_FOLDER"], "step_files.json").write_text(json.dumps(entries))
