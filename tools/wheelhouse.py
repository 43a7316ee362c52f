"""Build the wheelhouse for ``make gpu``: SGLang's dependencies except torch, without files that a run never reads.

``python tools/wheelhouse.py`` downloads the wheels in ``tools/wheels.txt`` and packs one archive, with the modules that
``tools/prebuild.py`` compiled; ``tools/gpu/site.py`` unpacks it on a machine without a network.
"""

from __future__ import annotations

import io
import itertools
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LIST, IMPORTED, IMAGE = ROOT / "tools/wheels.txt", ROOT / "tools/imported.txt", ROOT / "requirements/gpu-image.txt"
ARCHIVE, DOWNLOADS, MODULES = ROOT / ".wheelhouse/site.tar.xz", ROOT / ".cache/wheels", ROOT / ".cache/modules"
# FA3's library, in pieces: one for each transfer, with the tracked files. They stay on the machine between calls.
FA3, FA3_FILES = ROOT / ".wheelhouse/fa3", "sgl_kernel/flash_ops*.so"
TRANSFER, SPARE = 64 << 20, 1 << 20  # bytes of one transfer to the machine: the tracked files and the archive
DATA = re.compile(r"[^/]+\.data/(\w+)/")
PYTHON, PLATFORMS = "3.12", [f"manylinux_2_{minor}_x86_64" for minor in (39, 34, 28, 27, 26, 24, 17, 12, 5)]


Wheels = dict[str, tuple[str, ...]]  # pinned requirement -> patterns of the files left out


def module(file: str) -> str:
    """Return the dotted module name of a wheel's file (``a/b/__init__.py`` is ``a.b``)."""
    folder, _, name = file.rpartition("/")
    stem = name.removesuffix(".py") if name.endswith(".py") else name.partition(".")[0] if ".so" in name else name
    return f"{folder}/{stem}".strip("/").removesuffix("/__init__").replace("/", ".")


def read_list(text: str) -> Wheels:
    """Parse lines ``name==version [pattern …]``; ``#`` starts a comment."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return {words[0]: tuple(words[1:]) for words in lines if words}


def download(requirements: Iterable[str]) -> list[Path]:
    """Download the listed wheels for the Python and platform of ``make gpu``; cached."""
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    target = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:"]
    platforms = [option for platform in [*PLATFORMS, "manylinux2014_x86_64"] for option in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "download", "--no-deps", "--dest", str(DOWNLOADS), *target, *platforms, *requirements]
    subprocess.run(command, check=True)
    found = {parse_wheel_filename(path.name)[:2]: path for path in DOWNLOADS.glob("*.whl")}
    pinned = (requirement.split("==") for requirement in requirements)
    return [found[canonicalize_name(name), Version(version)] for name, version in pinned]


def kept(source: Path, dropped: Iterable[str], imported: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file of a wheel that matches no ``dropped`` pattern or is ``imported``."""
    with zipfile.ZipFile(source) as files:
        for entry in files.infolist():
            scheme = DATA.match(entry.filename)
            name = entry.filename[scheme.end() :] if scheme else entry.filename
            installed = scheme is None or scheme[1] in ("purelib", "platlib")
            packed = module(name) in imported or not any(fnmatchcase(name, pattern) for pattern in dropped)
            if installed and packed and not entry.is_dir():
                yield name, files.read(entry)


def pack(files: dict[str, bytes], target: Path) -> None:
    """Write one reproducible archive, sorted so that similar files are adjacent, which compresses better."""
    with tarfile.open(target, "w:xz", preset=6) as archive:
        for name in sorted(files, key=lambda name: (Path(name).suffix, name)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o644
            archive.addfile(entry, io.BytesIO(files[name]))


def limit() -> int:
    """Return the bytes that an archive or a piece may have beside the tracked files."""
    tracked = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-z"], text=True).split("\0")
    return TRANSFER - SPARE - sum((ROOT / name).lstat().st_size for name in tracked if name)


def divide(library: bytes, most: int) -> None:
    """Write a compressed library as files of ``most`` bytes, named ``01-of-12``; :mod:`tools.gpu.site` joins them."""
    packed, number = lzma.compress(library), itertools.count(1)
    parts = [packed[start : start + most] for start in range(0, len(packed), most)]
    shutil.rmtree(FA3, ignore_errors=True)
    FA3.mkdir(parents=True)
    for part in parts:
        (FA3 / f"{next(number):02}-of-{len(parts):02}").write_bytes(part)


def build_fa3() -> None:
    [wheel] = download([requirement for requirement in read_list(LIST.read_text()) if "sglang-kernel" in requirement])
    with zipfile.ZipFile(wheel) as archive:
        [library] = [name for name in archive.namelist() if fnmatchcase(name, FA3_FILES)]
        divide(archive.read(library), limit())
    print(*sorted(path.name for path in FA3.iterdir()))


def build() -> None:
    """Build the wheelhouse and print its size.

    Raises:
        SystemExit: it is larger than :func:`limit`.
    """
    wheels, imported = read_list(LIST.read_text()), frozenset(IMPORTED.read_text().splitlines())
    files: dict[str, bytes] = {f"prebuilt/{path.name}": path.read_bytes() for path in MODULES.glob("*.*")}
    for (requirement, dropped), source in zip(wheels.items(), download(wheels), strict=True):
        mine = dict(kept(source, dropped, imported))
        print(f"{sum(map(len, mine.values())) / 2**20:7.2f} MiB, {len(mine):5} files  {requirement}")
        files |= mine
    ARCHIVE.parent.mkdir(exist_ok=True)
    unfinished = ARCHIVE.with_suffix(".part")
    pack(files, unfinished)
    unfinished.replace(ARCHIVE)
    size, most = ARCHIVE.stat().st_size, limit()
    print(f"{ARCHIVE.relative_to(ROOT)}: {size / 2**20:.1f} MiB, at most {most / 2**20:.1f}")
    if size > most:
        raise SystemExit(f"{ARCHIVE} is too large: leave more files behind in {LIST}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--fa3", action="store_true", help="write the pieces of FA3's library instead")
    (build_fa3 if parser.parse_args().fa3 else build)()
