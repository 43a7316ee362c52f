"""The wheels in an environment with stock SGLang and nothing else: the core alone, then all three serve.

A fresh installation takes minutes and gigabytes. Here the distributions that ``make setup`` installs for SGLang on a
CPU are links to the environment of the tests; what only our extras need is absent.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_dflash import __version__
from sglang_dflash.upstream import TESTED_SGLANG
from sglang_dflash_lab.bench.server import free_port
from tests.support.servers import started, worker_info
from tools.dist import DISTRIBUTIONS, build

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
QUESTION = "Dan has 30 cards. Dan loses 6 of them. Dan loses 18 of them. How many cards does Dan have now?"
# Without the CPU platform, SGLang cannot be imported with this environment's torchvision.
ORIGIN = (
    "import importlib.util as u; print(*(u.find_spec(name).origin for name in ('sglang', 'sglang_dflash')), sep='\\n')"
)
PLAIN = "import sglang.srt.platforms as p; print(type(p.current_platform).__name__)"


def test_the_core_installs_alone_and_the_three_wheels_serve_the_demo_beside_stock_sglang(tmp_path: Path) -> None:
    core, cpu, lab = (build(tmp_path / "dist", which)[0] for which in DISTRIBUTIONS)
    bin = bare_environment(tmp_path / "bare", core, cpu, lab)
    away = {"PATH": f"{bin}:/usr/bin:/bin", "PYTHONPATH": "", "HOME": str(tmp_path)}

    def say(*command: str) -> str:
        return subprocess.check_output([*command], cwd=tmp_path, env=away, text=True)

    sglang, ours = say("python", "-c", ORIGIN).splitlines()[-2:]
    assert sglang.startswith(str(bin.parent / "stock")) and ours.startswith(str(bin.parent / "lib"))
    printed = say("sglang-dflash", "version").strip()
    assert printed == f"sglang-dflash {__version__} for SGLang {TESTED_SGLANG}; installed: {TESTED_SGLANG}"
    missing = subprocess.run([bin / "sglang-dflash", "pairs"], env=away, capture_output=True, text=True, check=False)
    assert missing.returncode == 2 and "No such command 'pairs'" in missing.stderr

    install(tmp_path / "bare", cpu, lab)
    assert say("python", "-c", PLAIN).split()[-1] == "DFlashCpuPlatform"
    port = free_port()
    assert (bin.parent / "share/sglang-dflash/launch/serve.sh").is_file()
    target, drafter = (
        say("sglang-dflash", "pairs", "path", "tiny-hybrid", *which).strip() for which in ((), ("--drafter", "good"))
    )
    pair = ("--model-path", target, "--speculative-draft-model-path", drafter, "--dtype", "float32")
    serve = (str(bin / "python"), "-m", "sglang.launch_server", *pair, "--speculative-algorithm", "DFLASH")
    command = ["env", f"--chdir={tmp_path}", *serve, "--port", str(port)]  # away from the checkout's own package
    with started(tmp_path, port, command, **away) as server:
        assert f"sglang-dflash {__version__} serves DFLASH" in server.log
        assert worker_info(server)["drafter"].startswith(str(bin.parent / "lib"))
        body: dict[str, object] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        answer = server.post("/v1/chat/completions", {"model": "m", **body}).json()
        assert "#### 6" in answer["choices"][0]["message"]["content"], answer
        assert sum(worker_info(server)["steps_by_width"].values()) > 0


def bare_environment(folder: Path, wheel: Path, *later: Path) -> Path:
    """Make an environment in ``folder``, install the wheel with pip, and return the folder of its commands.

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
        except PackageNotFoundError:  # such as CUDA's libraries, which a CPU build of torch lacks
            continue
        waiting += [Requirement(line) for line in found[name].requires or ()]
    return list(found.values())
