"""The record of the equality matrix: a run that was interrupted goes on where it ended.

``make test-matrix`` runs the cells that are not recorded, then this module, which counts what all of them compared. A
changed package, or another SGLang, starts over.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import sglang_dflash


class Matrix:
    """Finished cells by name, each with a result, in a file of JSON lines that several processes may append to."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @cached_property
    def key(self) -> str:
        """What a result holds for: every file of the package, and SGLang's version."""
        package = Path(sglang_dflash.__file__).parent
        digest = hashlib.sha256(importlib.metadata.version("sglang").encode())
        for path in sorted(package.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    def finished(self) -> dict[str, Any]:
        """The result of every cell that this very package has passed."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return {line["cell"]: line["result"] for line in map(json.loads, lines) if line["key"] == self.key}

    def add(self, cell: str, result: Any) -> None:
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"key": self.key, "cell": cell, "result": result}) + "\n")


MATRIX = Matrix(Path(__file__).parents[2] / ".cache" / "matrix.jsonl")


def main() -> None:
    from tests.engine.test_dflash_equality import FULL

    finished = MATRIX.finished()
    compared = [finished[str(case)] for case in FULL if str(case) in finished]
    print(f"{sum(compared)} generations compared in {len(compared)} of {len(FULL)} cells, package {MATRIX.key}")
    sys.exit(len(compared) < len(FULL))


if __name__ == "__main__":
    main()
