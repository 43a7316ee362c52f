"""A release of SGLang beside the environment's own: its folder, processes that import it, what it asks of packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / ".cache/sglang"


def install(wanted: str, releases: Path = RELEASES) -> Path:
    """Folder that holds ``sglang`` of a release, downloaded once; about 120 MB, nothing in the environment changes.

    Raises:
        SystemExit: the index has no such release for this Python; pip has said so.
    """
    folder = releases / wanted
    if not folder.exists():
        unfinished = folder.with_name(f"{wanted}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--target"]
        alone = ["--no-deps", "--no-compile", "--only-binary=:all:"]
        if subprocess.run([*pip, str(unfinished), *alone, f"sglang=={wanted}"], check=False).returncode:
            raise SystemExit(f"sglang=={wanted} could not be installed beside; nothing was changed")
        unfinished.rename(folder)
    return folder


def environment(folder: Path | None, *, plugins: bool) -> dict[str, str]:
    """Variables of a process whose ``sglang`` is the folder's, or the environment's own for None.

    Without plugins no code of this package runs when SGLang is imported, so that all of it can be looked at.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    path = os.pathsep.join(map(str, filter(None, (folder, ROOT))))
    chosen = {} if plugins else {"SGLANG_PLUGINS": "none"}
    return {**kept, **chosen, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def run(module: str, *arguments: Path, folder: Path | None = None, plugins: bool = False) -> str | None:
    """Run a module; None if it went well, otherwise the last line that it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env=environment(folder, plugins=plugins),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


def unmet(folder: Path) -> list[str]:
    """Packages of this environment that are not what the release asks for, where the installed release is content."""
    (info,) = folder.glob("sglang-*.dist-info")
    asked, content = wishes(Distribution.at(info)), wishes(distribution("sglang"))
    return [f"{name} {found}, not {wish}" for name, (found, wish) in asked.items() if name not in content]


def wishes(release: Distribution) -> dict[str, tuple[str, str]]:
    """Installed packages that a release does not accept: name -> (version found, versions asked for)."""
    refused = {}
    for requirement in map(Requirement, release.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            try:
                found = version(requirement.name)
            except PackageNotFoundError:
                continue  # SGLang's GPU packages: the CPU environment does without
            if not requirement.specifier.contains(found, prereleases=True):
                refused[requirement.name] = (found, str(requirement.specifier))
    return refused
