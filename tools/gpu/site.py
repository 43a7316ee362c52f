"""Unpack the wheelhouse and make it and this checkout importable. Needs the standard library only."""

from __future__ import annotations

import os
import tarfile
import tomllib
from pathlib import Path

from sglang_dflash import __version__

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / ".wheelhouse/site.tar.xz"
PACKAGES = (ROOT, ROOT / "cpu_platform", ROOT / "lab")
STAND_INS = ROOT / "tools/gpu/standins/path"
CUDA, CPU = "cuda", "cpu"


def unpack(target: Path) -> None:
    """Fill ``target`` with the wheelhouse, once, and with entry points of this checkout.

    Raises:
        SystemExit: there is no wheelhouse.
    """
    if not ARCHIVE.exists():
        raise SystemExit(f"{ARCHIVE} is missing. Fix: run `make wheelhouse` on a machine with a package index")
    stamp, size = target / ".unpacked", str(ARCHIVE.stat().st_size)
    if not stamp.exists() or stamp.read_text() != size:
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(target, filter="data")
        stamp.write_text(size)
    (target / "sitecustomize.py").write_text("from tools.gpu import site\n\nsite.start_process()\n")
    for folder in PACKAGES:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        _install(target, project["name"], __version__, project["entry-points"])
    plugin = {"sglang.srt.plugins": {"gpu_kit": "tools.gpu.standins.plugin:register"}}
    _install(target, "gpu-kit", "1.0", plugin)


def _install(target: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    """Write a distribution's metadata as an installer would, so that its entry points are found."""
    info = target / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [line for group, each in groups.items() for line in (f"[{group}]", *map(" = ".join, each.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))


def environment(target: Path, device: str) -> dict[str, str]:
    """Environment of a process that runs on ``device`` with the packages in ``target``."""
    stand_ins = [str(STAND_INS)] if device == CUDA else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*stand_ins, str(target), *map(str, PACKAGES)]),
        "PYTHONUNBUFFERED": "1",
        "GPU_KIT_DEVICE": device,
        # The compiled prefix tree requires the torch release that SGLang was built with.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def start_process() -> None:
    """Prepare a process of the kit; its ``sitecustomize`` calls this first."""
    from sglang_dflash_cpu import torchvision_import

    torchvision_import.install()
