"""Make the wheelhouse or the installed SGLang importable with this checkout. Needs the standard library only."""

from __future__ import annotations

import lzma
import os
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from sglang_dflash import __version__

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / ".wheelhouse/site.tar.xz"
FA3 = ROOT / ".wheelhouse/fa3"  # pieces of its library (tools/wheelhouse.py)
MODULES = "prebuilt"  # folder of the archive
PACKAGES = (ROOT, ROOT / "cpu_platform", ROOT / "lab")
CUDA, CPU = "cuda", "cpu"
# SGLang imports uvloop; the loop of the standard library replaces it.
UVLOOP = "from asyncio import DefaultEventLoopPolicy as EventLoopPolicy, new_event_loop, run\n"
LOOPBACK = dict.fromkeys(("SGLANG_HOST_IP", "HOST_IP"), "127.0.0.1")
LOOPBACK |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")


def unpack(target: Path) -> None:
    """Fill ``target`` with entry points of this checkout and, unless SGLang is installed, the wheelhouse, once.

    Raises:
        SystemExit: there is neither.
    """
    target.mkdir(parents=True, exist_ok=True)
    if find_spec("sglang") is None:
        if not ARCHIVE.exists():
            raise SystemExit(f"{ARCHIVE} is missing. Fix: run `make wheelhouse` on a machine with a package index")
        stamp, size = target / ".unpacked", str(ARCHIVE.stat().st_size)
        if not stamp.exists() or stamp.read_text() != size:
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(target, filter="data")
            (target / "uvloop.py").write_text(UVLOOP)
            (target / "sitecustomize.py").write_text("from tools.gpu import site\n\nsite.start_process()\n")
            stamp.write_text(size)
        join(target / "sgl_kernel/flash_ops.abi3.so")
    for folder in PACKAGES:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        _install(target, project["name"], __version__, project["entry-points"])
    _install(target, "gpu-kit", "1.0", {"sglang.srt.plugins": {"gpu_kit": "tools.gpu.plugin:register"}})


def join(library: Path) -> None:
    """Write FA3's library if all of its pieces are here."""
    pieces = sorted(FA3.glob("*-of-*"))
    if pieces and not library.exists() and len(pieces) == int(pieces[0].name[-2:]):
        library.write_bytes(lzma.decompress(b"".join(piece.read_bytes() for piece in pieces)))


def has_fa3() -> bool:
    package = find_spec("sgl_kernel")
    return package is not None and any(
        any(Path(place).glob("flash_ops*.so")) for place in package.submodule_search_locations or ()
    )


def _install(target: Path, name: str, of_version: str, groups: dict[str, dict[str, str]]) -> None:
    """Write a distribution's metadata as an installer would, so that its entry points are found."""
    try:
        version(name)
    except PackageNotFoundError:
        info = target / f"{name.replace('-', '_')}-{of_version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {of_version}\n")
        lines = [line for group, each in groups.items() for line in (f"[{group}]", *map(" = ".join, each.items()))]
        (info / "entry_points.txt").write_text("\n".join(lines))


def environment(target: Path) -> dict[str, str]:
    """Environment of a process that runs with the packages in ``target``.

    ``GPU_KIT_MODULES`` names the folder of SGLang's compiled modules in an unpacked wheelhouse.
    """
    return {
        **{"SERVER_START_SECONDS": "240", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"},
        **os.environ,
        **LOOPBACK,
        "PYTHONPATH": os.pathsep.join([str(target), *map(str, PACKAGES)]),
        "PYTHONUNBUFFERED": "1",
        "GPU_KIT_MODULES": str(target / MODULES) if (target / MODULES).exists() else "",
        # The compiled prefix tree requires the torch release that SGLang was built with.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def start_process() -> None:
    """Prepare a process that uses the wheelhouse; its ``sitecustomize`` calls this first."""
    from sglang_dflash_cpu import torchvision_import

    torchvision_import.install()
