"""Build the wheelhouse for ``make gpu``: SGLang's dependencies except torch, without files that a run never reads.

``python tools/wheelhouse.py`` downloads the wheels in ``tools/wheels.txt`` and packs one archive, which
``tools/gpu/site.py`` unpacks on a machine without a network.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LIST, IMPORTED = ROOT / "tools/wheels.txt", ROOT / "tools/imported.txt"
ARCHIVE, DOWNLOADS = ROOT / ".wheelhouse/site.tar.xz", ROOT / ".cache/wheels"
# What the machine's transfer limit leaves next to the repository (24 MiB of tracked files).
LIMIT = 40 << 20
DATA = re.compile(r"[^/]+\.data/(\w+)/")
PYTHON, PLATFORMS = "3.12", [f"manylinux_2_{minor}_x86_64" for minor in (39, 34, 28, 27, 26, 24, 17, 12, 5)]


@dataclass(frozen=True)
class Wheel:
    """A line of the list: a pinned distribution, and patterns of the files left out."""

    requirement: str
    dropped: tuple[str, ...] = ()

    def keeps(self, file: str, imported: frozenset[str]) -> bool:
        """Whether to pack a file: it matches no dropped pattern, or a recorded run imported it."""
        return module(file) in imported or not any(fnmatchcase(file, pattern) for pattern in self.dropped)


def module(file: str) -> str:
    """Dotted module name of a wheel's file (``a/b/__init__.py`` is ``a.b``)."""
    folder, _, name = file.rpartition("/")
    stem = name.removesuffix(".py") if name.endswith(".py") else name.partition(".")[0] if ".so" in name else name
    return f"{folder}/{stem}".strip("/").removesuffix("/__init__").replace("/", ".")


def read_list(text: str) -> list[Wheel]:
    """Parse lines ``name==version [pattern …]``; ``#`` starts a comment."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [Wheel(words[0], tuple(words[1:])) for words in lines if words]


def download(wheels: list[Wheel]) -> list[Path]:
    """Download the listed wheels for the Python and platform of ``make gpu``; cached."""
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    target = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:"]
    platforms = [option for platform in [*PLATFORMS, "manylinux2014_x86_64"] for option in ("--platform", platform)]
    names = [wheel.requirement for wheel in wheels]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(DOWNLOADS), *target, *platforms, *names], check=True)
    found = {parse_wheel_filename(path.name)[:2]: path for path in DOWNLOADS.glob("*.whl")}
    pinned = (wheel.requirement.split("==") for wheel in wheels)
    return [found[canonicalize_name(name), Version(version)] for name, version in pinned]


def kept(source: Path, wheel: Wheel, imported: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    """(installed path, content) of each file to pack from a downloaded wheel."""
    with zipfile.ZipFile(source) as files:
        for entry in files.infolist():
            scheme = DATA.match(entry.filename)
            name = entry.filename[scheme.end() :] if scheme else entry.filename
            installed = scheme is None or scheme[1] in ("purelib", "platlib")
            if installed and not entry.is_dir() and wheel.keeps(name, imported):
                yield name, files.read(entry)


def pack(files: dict[str, bytes], target: Path) -> None:
    """Write one reproducible archive; similar files lie side by side, which compresses better."""
    with tarfile.open(target, "w:xz", preset=4) as archive:
        for name in sorted(files, key=lambda name: (Path(name).suffix, name)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o644
            archive.addfile(entry, io.BytesIO(files[name]))


def build() -> None:
    """Build the wheelhouse and print its size.

    Raises:
        SystemExit: it is larger than :data:`LIMIT`.
    """
    wheels, imported = read_list(LIST.read_text()), frozenset(IMPORTED.read_text().splitlines())
    files: dict[str, bytes] = {}
    for wheel, source in zip(wheels, download(wheels), strict=True):
        mine = dict(kept(source, wheel, imported))
        print(f"{sum(map(len, mine.values())) / 2**20:7.2f} MiB, {len(mine):5} files  {wheel.requirement}")
        files |= mine
    ARCHIVE.parent.mkdir(exist_ok=True)
    unfinished = ARCHIVE.with_suffix(".part")
    pack(files, unfinished)
    unfinished.replace(ARCHIVE)
    size = ARCHIVE.stat().st_size
    print(f"{ARCHIVE.relative_to(ROOT)}: {size / 2**20:.1f} MiB, at most {LIMIT >> 20}")
    if size > LIMIT:
        raise SystemExit(f"{ARCHIVE} is too large: leave more files behind in {LIST}")


if __name__ == "__main__":
    build()
