"""``make dist``: build and check a wheel and a source distribution of each of the three distributions.

A wheel is built from its source distribution, which shows that the latter is complete. It contains the tracked files of
its package and, for the core, the launch scripts: no other file.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash import __version__

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Distribution:
    """One distribution of this repository.

    Attributes:
        package: its import name; the distribution's name has hyphens.
        folder: of its ``pyproject.toml``, relative to the repository.
        largest: limit of the wheel's size, bytes.
        scripts: tracked files that are installed; documents: those that only the source distribution has.
    """

    package: str
    folder: str
    largest: int
    scripts: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        return f"{self.package}-{__version__}"

    def tracked(self, *paths: str) -> set[str]:
        """Return the tracked files below ``paths``, relative to the folder."""
        command = ["git", "ls-files", "-z", *paths]
        listed = subprocess.check_output(command, cwd=ROOT / self.folder, text=True) if paths else ""
        return set(listed.split("\0")[:-1])


DOCUMENTS = ("CHANGELOG.md", "CONTRIBUTING.md", "docs", "patches")
CORE = Distribution("sglang_dflash", ".", 600_000, ("launch/*.sh",), DOCUMENTS)
CPU = Distribution("sglang_dflash_cpu", "cpu_platform", 100_000)
LAB = Distribution("sglang_dflash_lab", "lab", 25_000_000)  # mostly the tiny pairs' weights, 21 MB
DISTRIBUTIONS = (CORE, CPU, LAB)


def problems(which: Distribution, wheel: Path, source: Path) -> list[str]:
    """Return the errors in the contents and the size of the two files, one line each."""
    name = which.stem
    with zipfile.ZipFile(wheel) as archive:
        packed = {file for file in archive.namelist() if not file.startswith(f"{name}.dist-info/")}
        licensed = f"{name}.dist-info/licenses/LICENSE" in archive.namelist()
    with tarfile.open(source) as unpacked:
        shipped = {each.name.removeprefix(f"{name}/") for each in unpacked.getmembers() if each.isfile()}
    package, scripts = which.tracked(which.package), which.tracked(*which.scripts)
    documents = which.tracked(*which.documents)
    expected = package | {f"{name}.data/data/share/sglang-dflash/{script}" for script in scripts}
    needed = {"PKG-INFO", "setup.cfg", "LICENSE", "README.md", "pyproject.toml", *documents, *package, *scripts}
    generated = {file for file in shipped if file.startswith(f"{which.package}.egg-info/")} | {"MANIFEST.in"}
    found = [f"{wheel.name} lacks {file}" for file in sorted(expected - packed)]
    found += [f"{wheel.name} has {file}" for file in sorted(packed - expected)]
    found += [f"{source.name} lacks {file}" for file in sorted(needed - shipped)]
    found += [f"{source.name} has {file}" for file in sorted(shipped - needed - generated)]
    found += [] if licensed else [f"{wheel.name} lacks the licence"]
    size = wheel.stat().st_size
    return found + ([f"{wheel.name} has {size:,} bytes"] if size > which.largest else [])


def build(folder: Path, which: Distribution = CORE) -> tuple[Path, Path]:
    """Build wheel and source distribution in ``folder``, offline, with the environment's setuptools.

    Raises:
        SystemExit: a build or a check failed.
    """
    wheel, source = folder / f"{which.stem}-py3-none-any.whl", folder / f"{which.stem}.tar.gz"
    for module, *arguments in (
        ("build", "--no-isolation", "--outdir", str(folder), str(ROOT / which.folder)),
        ("twine", "check", "--strict", str(wheel), str(source)),
    ):
        done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{done.stderr}\n{module} failed")
    if found := problems(which, wheel, source):
        raise SystemExit("\n".join(found))
    return wheel, source


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    for which in DISTRIBUTIONS:
        for path in build(ROOT / "dist", which):
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.2f} MB, checked")
