"""Unpack the wheelhouse and make this checkout importable beside it. Needs the standard library only."""

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
CUDA, FAKE, CPU = "cuda", "fake", "cpu"  # a real device, one that is faked on the host, this package's CPU platform
FAKED = {
    **{"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "SGLANG_ENABLE_TORCH_COMPILE": "0"},
    # An interpreted start takes minutes.
    **{"SERVER_START_SECONDS": "1800", "SGLANG_HEALTH_CHECK_TIMEOUT": "300"},
}


def unpack(target: Path) -> None:
    """Fill ``target`` with the wheelhouse, once, and with entry points of this checkout.

    Raises:
        SystemExit: there is no wheelhouse.
    """
    if not ARCHIVE.exists():
        raise SystemExit(f"{ARCHIVE} is missing: run `make wheelhouse` on a machine with a package index")
    stamp = target / ".unpacked"
    size = str(ARCHIVE.stat().st_size)
    if not stamp.exists() or stamp.read_text() != size:
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(target, filter="data")
        stamp.write_text(size)
    (target / "sitecustomize.py").write_text("from tools.gpu import startup\n\nstartup.install()\n")
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
    stand_ins = [] if device == CPU else [str(STAND_INS)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*stand_ins, str(target), *map(str, PACKAGES)]),
        "PYTHONUNBUFFERED": "1",
        "GPU_KIT_DEVICE": device,
        # The compiled prefix tree misreads tensor types under any torch but SGLang's own.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        **(FAKED if device == FAKE else {}),
    }
