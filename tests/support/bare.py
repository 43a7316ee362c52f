"""An environment with stock SGLang and built wheels of this repository: no editable install, extras or test tools.

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


def bare_environment(folder: Path, wheel: Path, *later: Path) -> Path:
    """Make the environment in ``folder`` and install the wheel with pip; the folder of its commands.

    Args:
        later: wheels that :func:`install` may add; what they need is there.
    """
    venv.create(folder, symlinks=True)
    stock = folder / "stock"
    stock.mkdir()
    for each in stock_distributions(line for built in (wheel, *later) for line in requirements(built)):
        for name in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (link := stock / name).exists() and not name.endswith(".pth"):
                link.symlink_to(Path(str(each.locate_file(name))).resolve())
    [packages] = folder.glob("lib/*/site-packages")
    (packages / "stock.pth").write_text(f"{stock}\n")
    install(folder, wheel)
    return folder / "bin"


def install(folder: Path, *wheels: Path) -> None:
    """Install wheels in the environment in ``folder``, without a package index."""
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check"]
    names = map(str, wheels)
    subprocess.run([*pip, "install", "--quiet", "--no-index", *names], check=True, env={"PATH": "/usr/bin:/bin"})


def requirements(wheel: Path) -> list[str]:
    """What the wheel needs without extras, other wheels of this repository left out."""
    [built] = distributions(path=[str(wheel)])
    return [line for line in built.requires or () if "extra ==" not in line and not line.startswith("sglang-dflash")]


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
