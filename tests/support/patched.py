"""A copy of the installed SGLang, made of links, for patches to be tried on."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

PATCHES = Path(__file__).parents[2] / "patches"


def series() -> list[Path]:
    return sorted(PATCHES.glob("[0-9]*.patch"))


def touched(patch: Path) -> str:
    """The one file that a patch changes, relative to the package's parent."""
    (file,) = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), flags=re.MULTILINE)
    return str(file)


def copy_of_sglang(folder: Path) -> Path:
    """``folder/sglang`` as links to the installed files; those that patches touch are real copies."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    installed = Path(spec.submodule_search_locations[0])
    subprocess.run(["cp", "--recursive", "--symbolic-link", str(installed), str(folder)], check=True)
    for patch in series():
        file = folder / touched(patch)
        file.unlink()
        shutil.copy(installed.parent / touched(patch), file)
    return folder


def apply(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PATCHES / "apply.sh"), *arguments], capture_output=True, text=True, check=False)


def without_plugins(tree: Path) -> dict[str, str]:
    """The environment in which the copy under ``tree`` runs with plugins switched off."""
    root = Path(__file__).parents[2]
    path = f"{tree}:{root}:{root}/cpu_platform"
    return {"PYTHONPATH": path, "SGLANG_PLUGINS": "none", "SGLANG_PLATFORM": "dflash_cpu"}
