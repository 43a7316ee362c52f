"""``python -m tools.contract X.Y.Z …``: a report of each release; status 1 if one does not fit."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from sglang_dflash.upstream import installed_version
from tools.contract import release, tree
from tools.contract.compare import BREAKS, compare
from tools.contract.needs import attributes_read
from tools.contract.probe import Need, Seen, as_tuple, read_needs
from tools.contract.report import Result, markdown


def seen(file: Path) -> dict[str, Seen]:
    names = json.loads(file.read_text())["names"]
    return {path: Seen(**{key: as_tuple(value) for key, value in row.items()}) for path, row in names.items()}


def needs_of_the_tested(scratch: Path) -> tuple[list[Need], dict[str, Seen]]:
    """What this package needs, and how the installed release has it."""
    needs, before = scratch / "needs.json", scratch / "before.json"
    if problem := release.run("tools.contract.needs", needs, before):
        raise SystemExit(f"the installed SGLang {installed_version()}: {problem}")
    return read_needs(needs), seen(before)


def examine(wanted: str, needs: list[Need], before: dict[str, Seen], scratch: Path) -> Result:
    folder = release.install(wanted)
    tested = str(installed_version())
    after, outcomes = scratch / f"{wanted}.json", scratch / f"{wanted}-start.json"
    failed = release.run("tools.contract.probe", scratch / "needs.json", after, folder=folder)
    broken = release.run("tools.contract.start", outcomes, folder=folder, plugins=True)
    found = [] if failed else compare(needs, before, seen(after), attributes_read())
    return Result(
        wanted,
        tested,
        len(needs),
        found,
        {
            change.need.path: tree.places_of(change.need.path.rpartition(".")[2], folder)
            for change in found
            if change.kind == BREAKS and change.what.startswith("not found")
        },
        failed,
        {"every command": broken} if broken else json.loads(outcomes.read_text()),
        tree.refused_patches(folder),
        release.unmet(folder),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.contract", description=__doc__)
    parser.add_argument("releases", nargs="+", metavar="X.Y.Z")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wanted = parser.parse_args().releases
        needs, before = needs_of_the_tested(scratch)
        results = [examine(each, needs, before, scratch) for each in wanted]
    print("\n\n".join("\n".join(markdown(result)) for result in results))
    sys.exit(not all(result.fits for result in results))


if __name__ == "__main__":
    main()
