"""Promises of this package, the tests that prove them, and a planted bug for each that its first test must catch.

``python -m tests.promises`` prints the table. ``python -m tests.promises --mutants [NAME ...]`` plants the bugs one by
one in a copy of the package and runs the tests; a NAME is the beginning of a row's name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = "sglang_dflash", "tests"
VERDICTS = {0: "missed", 1: "caught"}  # by pytest's exit status; others mean that no test ran


@dataclass(frozen=True)
class Promise:
    """One row of ``promises.yaml``.

    Attributes:
        name: short, unique.
        promise: a sentence of the documents.
        tests: ids and files in ``tests``; the first one must fail with the bug.
        file: in the package; its only ``old`` becomes ``new`` when the bug is planted.
    """

    name: str
    promise: str
    tests: list[str]
    file: str
    old: str
    new: str


PROMISES = [Promise(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())]


def plant(promise: Promise, tree: Path) -> None:
    """Write a checkout with the bug to ``tree``: copies of package, tests and files, and links to other folders."""
    for entry in ROOT.iterdir():
        if entry.name in (PACKAGE, TESTS):
            shutil.copytree(entry, tree / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.is_dir() and not entry.name.startswith("."):
            (tree / entry.name).symlink_to(entry)
        elif entry.is_file():  # pytest resolves a linked pyproject.toml, and would test the package next to it
            shutil.copy(entry, tree)
    file = tree / PACKAGE / promise.file
    source = file.read_text()
    assert source.count(promise.old) == 1, f"{promise.file} does not have once: {promise.old}"
    file.write_text(source.replace(promise.old, promise.new))


def verdict(promise: Promise) -> tuple[str, str]:
    """Run the first test of a promise with its bug; return the verdict and the first error."""
    with TemporaryDirectory(prefix="promises-") as folder:
        tree = Path(folder).resolve()
        plant(promise, tree)
        path = os.pathsep.join(map(str, (tree, tree / "cpu_platform", tree / "lab")))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"{TESTS}/{promise.tests[0]}"]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    errors = [line[2:].strip() for line in ended.stdout.splitlines() if line.startswith("E ")]
    return VERDICTS.get(ended.returncode, f"no test ran ({ended.returncode})"), next(iter(errors), "")


def main() -> None:
    parser = ArgumentParser(prog="python -m tests.promises", description=__doc__)
    parser.add_argument("--mutants", nargs="*", metavar="NAME", help="plant bugs and run their tests; default: all")
    asked = parser.parse_args().mutants
    if asked is None:
        table = [(each.promise, "<br>".join(each.tests), each.file) for each in PROMISES]
        print(tabulate(table, headers=("promise", "tests", "planted bug in"), tablefmt="github"))
        return
    rows = []
    for each in PROMISES:
        if not asked or each.name.startswith(tuple(asked)):
            rows.append((each.name, each.file, *verdict(each)))
            print(*rows[-1][:3], sep=" | ", file=sys.stderr, flush=True)
    shown = [(*row[:3], row[3].replace("|", "/")[:80]) for row in rows]
    print(tabulate(shown, headers=("promise", "planted bug in", "verdict", "by"), tablefmt="github"))
    sys.exit(any(verdict != "caught" for _, _, verdict, _ in rows))


if __name__ == "__main__":
    main()
