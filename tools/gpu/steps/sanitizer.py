"""Our kernels under compute-sanitizer, if installed: out-of-bounds accesses and races."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.gpu.run_step import Run, Skip, main
from tools.gpu.steps.kernels import CASES

TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def body(run: Run) -> bool:
    program = shutil.which("compute-sanitizer")
    if program is None or not run.real:
        raise Skip("no compute-sanitizer on the PATH" if run.real else "compute-sanitizer needs a device")
    passed = True
    for tool in TOOLS:
        # With torch's cache, accesses beyond a tensor would stay within one allocation.
        environment = {**os.environ, "OPS_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [program, f"--tool={tool}", sys.executable, "-m", "pytest", "-q", "--noconftest", *CASES]
        root = Path(__file__).parents[3]
        ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        found = SUMMARY.search(ended.stdout)
        row = {"tool": tool, "errors": int(found[1]) if found else None}
        if found is None or int(found[1]):
            row["error"] = ended.stdout[-2000:] + ended.stderr[-500:]
            passed = False
        run.write(**row)
    return passed


if __name__ == "__main__":
    main("sanitizer", body)
