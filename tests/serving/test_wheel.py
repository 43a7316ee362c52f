"""The wheels in an environment with stock SGLang and nothing else: the core alone, then all three serve."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sglang_dflash import __version__
from sglang_dflash.upstream import TESTED_SGLANG
from sglang_dflash_lab.bench.server import free_port
from tests.support.bare import bare_environment, install
from tests.support.pair_servers import worker_info
from tests.support.servers import started
from tools.dist import DISTRIBUTIONS, build

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# As `launch/serve.sh demo --help` asks it.
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
    assert missing.returncode == 2 and "pip install sglang-dflash-lab" in missing.stderr

    install(tmp_path / "bare", cpu, lab)
    assert say("python", "-c", PLAIN).split()[-1] == "DFlashCpuPlatform"
    port = free_port()
    script = bin.parent / "share/sglang-dflash/launch/serve.sh"
    command = ["env", f"--chdir={tmp_path}", str(script), "demo"]  # away from the checkout's own package
    with started(tmp_path, port, command, **away, SGLANG_DFLASH_LISTEN_PORT=str(port)) as server:
        assert f"sglang-dflash {__version__} serves DFLASH" in server.log
        assert worker_info(server)["drafter"].startswith(str(bin.parent / "lib"))
        body: dict[str, object] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        answer = server.post("/v1/chat/completions", {"model": "m", **body}).json()
        assert "#### 6" in answer["choices"][0]["message"]["content"], answer
        assert sum(worker_info(server)["steps_by_width"].values()) > 0
