"""Ages of the rows of docs/measured.md: ``python -m tests.house.ages`` rewrites their last column."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/measured.md"
ROW = re.compile(r"(?m)^(\|.*\| ([0-9a-f]{7,8}) \| `([^`|]+)` \|) ?([^|\n]*)\|$")


def commits(since: str, *paths: str) -> int:
    """Return the number of commits after ``since``, of those that change ``paths``."""
    command = ["git", "rev-list", "--count", f"{since}..HEAD", "--", *paths]
    return int(subprocess.check_output(command, cwd=ROOT, text=True))


def rewritten(text: str) -> str:
    def row(found: re.Match[str]) -> str:
        begin, commit, code, _ = found.groups()
        return f"{begin} {commits(commit)}, {commits(commit, *code.split())} |"

    return ROW.sub(row, text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(rewritten(PAGE.read_text()))


if __name__ == "__main__":
    main()
