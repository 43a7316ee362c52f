"""Small files of a model: regular ones inside its folder, of a size that a small file may have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sglang_dflash.errors import DFlashError

LARGEST = 64 << 20  # bytes; the largest tokenizers have half of that


def inside(folder: Path, name: str) -> Path | None:
    """The path of a model's file; None if there is no such file.

    A link may lead to the blobs of the Hugging Face hub's cache, whose snapshots are made of links, and anywhere from a
    folder that this package made (:func:`views`).

    Raises:
        DFlashError: it lies, or a link leads, outside the folder.
    """
    try:
        path = folder / name
        if not path.is_file():
            return None
        real = path.resolve()
        own = folder.resolve()
        is_inside = real.is_relative_to(own) or own.is_relative_to(views().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have, a loop of links
        raise _unreadable(folder / name, str(error)) from None
    if is_inside or (real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")):
        return path
    raise DFlashError(
        f"{path} leads out of the model's folder, to {real}",
        expected="a model whose files lie in its folder",
        remedy="copy the file there, or name the folder that the link leads to",
    )


def views() -> Path:
    """The folder of the plain forms that SGLang loads drafters from, with links to their weights."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-dflash" / "drafters"


def read_text(file: Path) -> str:
    """A text file's content.

    Raises:
        DFlashError: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        is_small, is_regular = file.stat().st_size <= LARGEST, file.is_file()
        # Reading a pipe would wait for its writer.
        text = file.read_text(encoding="utf-8") if is_small and is_regular else ""
    except (OSError, ValueError) as error:  # not UTF-8, or a name that no file can have
        raise _unreadable(file, getattr(error, "strerror", None) or str(error)) from None
    if not is_small:
        raise _unreadable(file, f"more than {LARGEST >> 20} MiB")
    if not is_regular:
        raise _unreadable(file, "not a regular file")
    return text


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file's content.

    Raises:
        DFlashError: as :func:`read_text`, or it holds something else than a JSON object.
    """
    return parse_object(read_text(file), str(file))


def parse_object(text: str | bytes, about: str) -> dict[str, Any]:
    """A JSON object.

    Args:
        about: what holds the text, for the error.

    Raises:
        DFlashError: it is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
        raise _broken(f"{about} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _broken(f"{about} holds a {type(found).__name__}")
    return found


def _unreadable(file: Path, reason: str) -> DFlashError:
    return DFlashError(
        f"{file} cannot be read ({reason})",
        expected=f"a text file of up to {LARGEST >> 20} MiB",
        remedy="check the path and its permissions, or download the model again",
    )


def _broken(found: str) -> DFlashError:
    return DFlashError(found, expected="a JSON object", remedy="correct it, or download the model again")
