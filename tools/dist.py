"""``make dist``: a wheel and a source distribution in ``dist/``, checked.

The wheel is built from the source distribution, so that has everything it needs. The wheel holds the tracked files of
the package, all of them and no other, and the launch scripts: no tests, no tools, nothing that lay about.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from sglang_dflash import __version__

ROOT = Path(__file__).parents[1]
NAME = f"sglang_dflash-{__version__}"
SCRIPTS = f"{NAME}.data/data/share/sglang-dflash"
BESIDE = ("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")
# Mostly the tiny pairs' weights, 16 MB.
LARGEST = 20_000_000


def tracked(*folders: str) -> set[str]:
    listed = subprocess.check_output(["git", "ls-files", "-z", *folders], cwd=ROOT, text=True)
    return set(listed.split("\0")[:-1])


def problems(wheel: Path, source: Path) -> list[str]:
    """What is wrong with the contents or the size of the two files, one line each."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith(f"{NAME}.dist-info/")}
        licensed = f"{NAME}.dist-info/licenses/LICENSE" in archive.namelist()
    with tarfile.open(source) as unpacked:
        shipped = {each.name.removeprefix(f"{NAME}/") for each in unpacked.getmembers() if each.isfile()}
    package, scripts = tracked("sglang_dflash"), tracked("launch/*.sh")
    expected = package | {f"{SCRIPTS}/{script}" for script in scripts}
    allowed = {"PKG-INFO", "setup.cfg", "MANIFEST.in", *BESIDE, *package, *scripts, *tracked("docs", "patches")}
    generated = {name for name in shipped if name.startswith("sglang_dflash.egg-info/")}
    found = [f"{wheel.name} lacks {name}" for name in sorted(expected - packed)]
    found += [f"{wheel.name} has {name}" for name in sorted(packed - expected)]
    found += [f"{source.name} lacks {name}" for name in sorted(allowed - {"MANIFEST.in"} - shipped)]
    found += [f"{source.name} has {name}" for name in sorted(shipped - allowed - generated)]
    found += [] if licensed else [f"{wheel.name} lacks the licence"]
    sizes = {path.name: path.stat().st_size for path in (wheel, source)}
    return found + [f"{name} has {size:,} bytes" for name, size in sizes.items() if size > LARGEST]


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and source distribution of the tree, in ``folder``; with the environment's setuptools, so offline.

    Raises:
        SystemExit: a build or a check failed.
    """
    wheel, source = folder / f"{NAME}-py3-none-any.whl", folder / f"{NAME}.tar.gz"
    for module, *arguments in (
        ("build", "--no-isolation", "--outdir", str(folder), str(ROOT)),
        ("twine", "check", "--strict", str(wheel), str(source)),
    ):
        done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{done.stderr}\n{module} failed")
    if found := problems(wheel, source):
        raise SystemExit("\n".join(found))
    return wheel, source


if __name__ == "__main__":
    for path in build(ROOT / "dist"):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB, checked")
