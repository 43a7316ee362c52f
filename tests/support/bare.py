"""An environment with stock SGLang and a built wheel of this package: no editable install, no extras, no test tools.

A fresh installation takes minutes and gigabytes. Here the distributions that ``make setup`` installs for SGLang on a
CPU are linked from the environment of the tests; what only our extras need is not there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def bare_environment(folder: Path, wheel: Path) -> Path:
    """Make the environment in ``folder`` and install the wheel with pip; the folder of its commands."""
    venv.create(folder, symlinks=True)
    stock = folder / "stock"
    stock.mkdir()
    for each in stock_distributions(requirements(wheel)):
        for name in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (link := stock / name).exists() and not name.endswith(".pth"):
                link.symlink_to(Path(str(each.locate_file(name))).resolve())
    [packages] = folder.glob("lib/*/site-packages")
    (packages / "stock.pth").write_text(f"{stock}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", str(wheel)], check=True, env={"PATH": "/usr/bin:/bin"})
    return folder / "bin"


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for without extras."""
    [built] = distributions(path=[str(wheel)])
    return [line for line in built.requires or () if "extra ==" not in line]


def stock_distributions(asked: Iterable[str]) -> list[Distribution]:
    """SGLang, which is installed without its dependencies, what stands in for these on a CPU, and what is ``asked``."""
    cpu = (ROOT / "requirements/cpu.txt").read_text()
    names = ["torch", "torchvision", *re.findall(r"^[\w.-]+(?===)", cpu, re.MULTILINE), *asked]
    found: dict[str, Distribution] = {"sglang": distribution("sglang")}
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # such as CUDA's libraries beside a CPU build of torch
            continue
        waiting += [Requirement(line) for line in found[name].requires or ()]
    return list(found.values())
