"""Make the wheelhouse or the installed SGLang importable with this checkout. Needs the standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

from sglang_dflash import __version__

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / ".wheelhouse/site.tar.xz"
PACKAGES = (ROOT, ROOT / "cpu_platform", ROOT / "lab")
STAND_INS = ROOT / "tools/gpu/standins/path"
CUDA, CPU = "cuda", "cpu"
# SGLang imports uvloop; the loop of the standard library replaces it.
UVLOOP = "from asyncio import DefaultEventLoopPolicy as EventLoopPolicy, new_event_loop, run\n"
# Whether SGLang's compiled kernels load and run.
PROBE = """import torch, sgl_kernel
rows = torch.ones(2, 128, dtype=torch.bfloat16, device="cuda")
assert torch.equal(sgl_kernel.rmsnorm(rows, rows[0]), rows)"""


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
    """Environment of a process that runs on ``device`` with the packages in ``target``.

    Without FlashInfer, which SGLang requires, its installation is incomplete: stand-ins replace the kernels that it
    would compile, and ``sgl_kernel`` too if the packed one does not run.
    """
    found = {
        "SERVER_START_SECONDS": "180",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(target), *map(str, PACKAGES)]),
        "PYTHONUNBUFFERED": "1",
        "GPU_KIT_STAND_INS": "1" if device == CUDA and find_spec("flashinfer") is None else "",
        # The compiled prefix tree requires the torch release that SGLang was built with.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    probe = [sys.executable, "-c", PROBE]
    if device == CUDA and subprocess.run(probe, env=found, capture_output=True, check=False).returncode:
        found["PYTHONPATH"] = os.pathsep.join([str(STAND_INS), found["PYTHONPATH"]])
    return found


def start_process() -> None:
    """Prepare a process of the kit; its ``sitecustomize`` calls this first."""
    from sglang_dflash_cpu import torchvision_import

    torchvision_import.install()
