"""``make drift SGLANG=X.Y.Z``: list the names that this package uses and another SGLang release lacks.

A release is a version, ``newest``, or a folder that contains ``sglang``.

The release is installed in ``.cache/sglang`` (about 120 MB, without its dependencies) and checked in a separate
process. The exit status is 1 if anything is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

from tests.house.contract import SYMBOLS, Symbol, replaced

ROOT = Path(__file__).parents[1]
RELEASES = ROOT / ".cache/sglang"


def install(release: str, folder: Path = RELEASES) -> Path:
    """Download a release's wheel once and return the folder that contains ``sglang``.

    Raises:
        SystemExit: the package index has no such release for this Python.
    """
    if Path(release, "sglang").is_dir():
        return Path(release).resolve()
    target, unfinished = folder / release, folder / f"{release}.part"
    if not target.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
        options = ["--no-compile", "--only-binary=:all:", "--target", str(unfinished), f"sglang=={release}"]
        if subprocess.run([*pip, *options], check=False).returncode:
            raise SystemExit(f"sglang=={release} could not be installed")
        unfinished.rename(target)
    return target


def newest() -> str:
    """Return the newest release on the package index."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps", "sglang"]
    report = subprocess.check_output([*pip, "--dry-run", "--ignore-installed", "--report", "-"], text=True)
    return str(json.loads(report)["install"][0]["metadata"]["version"])


def used() -> list[Symbol]:
    """Return every symbol of the contract, and every function that the CPU platform replaces."""
    from sglang_dflash_cpu.replacements import TABLE

    return list((SYMBOLS | {row.path: replaced(row) for row in TABLE}).values())


def problems(symbols: list[Symbol], folder: Path) -> dict[str, str]:
    """Return the problem of each symbol by path, found by :meth:`Symbol.problem` with the ``sglang`` in ``folder``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "cpu_platform")))
    environment = {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "SGLANG_PLUGINS": "none"}
    ended = subprocess.run(
        [sys.executable, "-m", "tools.drift", "--look"],
        input=json.dumps([(each.path, each.params) for each in symbols]),
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{folder.name} could not be checked: {ended.stderr[-500:]}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def look() -> None:
    """Print the problems of the symbols on standard input, for :func:`problems`."""
    found = []
    for path, params in json.load(sys.stdin):
        try:
            problem = Symbol(path, tuple(params)).problem()
        except Exception as error:  # noqa: BLE001  another release's module may fail in any way
            problem = f"{path}: {type(error).__name__}: {error}"
        if problem:
            found.append((path, problem.removeprefix(f"{path}: ").partition("\n")[0]))
    print(f"\n{json.dumps(found)}")


def main() -> None:
    parser = ArgumentParser(prog="python -m tools.drift", description=__doc__)
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="a version, newest, or a folder with sglang")
    releases, symbols, fits = parser.parse_args().releases, used(), True
    for release in (newest() if release == "newest" else release for release in releases):
        folder = install(release)
        found = problems(symbols, folder)
        fits &= not found
        print(f"\n## SGLang {release}: {len(found)} of {len(symbols)} names differ\n")
        if found:
            print("| name, below `sglang.` | problem |\n|---|---|")
        for path, problem in found.items():
            print(f"| `{path.removeprefix('sglang.')}` | {problem} |")
    sys.exit(not fits)


if __name__ == "__main__":
    (look if sys.argv[-1] == "--look" else main)()
