"""``make drift SGLANG=X.Y.Z``: list the names that this package uses and another SGLang release lacks.

A release is a version, ``newest``, or a folder that contains ``sglang``.

The release is installed in ``.cache/sglang`` (about 120 MB, without its dependencies) and checked in a separate
process. The exit status is 1 if anything is missing. For the tested release, the list of its server flags is written to
``sglang_dflash/check/sglang_flags.json``. For another release, the differences are printed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from sglang_dflash.check.flags import LIST, Flag, known_flags
from sglang_dflash.upstream import TESTED_SGLANG
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
    return dict(_ask("--look", folder, [(each.path, each.params) for each in symbols]))


def flags(folder: Path) -> list[dict[str, Any]]:
    """Return the server flags of the ``sglang`` in ``folder``, as fields of :class:`Flag`."""
    return list(_ask("--flags", folder, None))


def _ask(question: str, folder: Path, about: Any) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "cpu_platform")))
    environment = {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "SGLANG_PLUGINS": "none"}
    ended = subprocess.run(
        [sys.executable, "-m", "tools.drift", question],
        input=json.dumps(about),
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{folder.name} could not be checked: {ended.stderr[-500:]}")
    return json.loads(ended.stdout.splitlines()[-1])


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


def describe_flags() -> None:
    """Print the flags of SGLang's own parser, for :func:`flags`."""
    from sglang.srt.arg_groups import fields
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.server_args import ServerArgs

    group_of = {}
    for module in pkgutil.iter_modules(fields.__path__):
        for each in vars(importlib.import_module(f"{fields.__name__}.{module.name}")).values():
            if namespace := getattr(each, "_NS_PATH", None):
                group_of |= dict.fromkeys(inspect.get_annotations(each), namespace)
    parser = ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    # The parser accepts any name here, argument resolution only these.
    late = {"speculative_draft_attention_backend": DRAFT_ATTENTION_BACKEND_CHOICES}
    types = {"int": "int", "float": "float", "human_readable_int": "count"}
    found = []
    for action in parser._actions:
        choices = action.choices or late.get(action.dest, ())
        flag = Flag(
            list(action.option_strings),
            group_of.get(action.dest, ""),
            1 if action.nargs is None else action.nargs,
            types.get(getattr(action.type, "__name__", ""), "str"),
            sorted(choices) if isinstance(choices, set) else list(choices),
        )
        usual = vars(Flag([]))
        found.append({key: value for key, value in vars(flag).items() if value != usual[key]})
    print(f"\n{json.dumps(sorted(found, key=lambda each: each['names']))}")


def write_flags(found: list[dict[str, Any]]) -> None:
    LIST.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n", encoding="utf-8")


def compare_flags(found: list[dict[str, Any]]) -> None:
    ours = {name for flag in known_flags() for name in flag.names}
    theirs = {name for flag in found for name in flag["names"]}
    print(f"\nflags gone: {' '.join(sorted(ours - theirs)) or 'none'}")
    print(f"flags new: {' '.join(sorted(theirs - ours)) or 'none'}")


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
        (write_flags if release == TESTED_SGLANG else compare_flags)(flags(folder))
    sys.exit(not fits)


if __name__ == "__main__":
    {"--look": look, "--flags": describe_flags}.get(sys.argv[-1], main)()
