"""What can be asked of a release's files alone: where a name went, and which patches apply."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tools.contract.release import ROOT

PATCHES = ROOT / "patches"


def places_of(name: str, folder: Path) -> list[str]:
    """Modules of a release that define a name at their top level."""
    defines = re.compile(rf"^(?:def|class) {name}\b|^{name}(?:: [^=\n]+)? = ", re.MULTILINE)
    files = sorted((folder / "sglang").rglob("*.py"))
    return [module(file.relative_to(folder)) for file in files if defines.search(file.read_text(encoding="utf-8"))]


def module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def refused_patches(folder: Path) -> list[str]:
    """Patches that do not apply to a release, each with what it is for."""
    return [
        f"{patch.stem}: {title(patch)}"
        for patch in sorted(PATCHES.glob("[0-9]*.patch"))
        if subprocess.run(
            ["patch", "--strip=1", "--forward", "--batch", "--dry-run", f"--directory={folder}", f"--input={patch}"],
            capture_output=True,
            check=False,
        ).returncode
    ]


def title(patch: Path) -> str:
    return patch.read_text(encoding="utf-8").partition("\n")[0]
