"""What a pair's server takes of the device: what our worker says it allocated, and what the device lacks then."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from tests.support.pair_servers import BFLOAT16, draft_arguments, target_arguments, worker_info
from tests.support.servers import running
from tools.gpu.run_step import Run, main

PAIRS = ("tiny-dense", "tiny-hybrid", "tiny-moe")
TOKENS = ("--max-total-tokens", "65536")


def body(run: Run) -> bool:
    passed = True
    for pair in run.pairs or PAIRS:

        def account(pair: str = pair) -> dict[str, Any]:
            command = (*target_arguments(pair, BFLOAT16), *draft_arguments(pair), *TOKENS)
            before = used()
            with run.folder() as folder, running(folder, *command, *run.flags(speculative=True)) as server:
                parts, after = worker_info(server)["memory_bytes"], used()
            return {"memory_bytes": parts, "sum": sum(parts.values()), "taken": after - before if before else None}

        passed &= run.measure({"pair": pair}, account)
    return passed


def used() -> int:
    """Bytes in use on the first device; 0 where there is no ``nvidia-smi`` to ask."""
    if not shutil.which("nvidia-smi"):
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.check_output(query, text=True).strip()) << 20


if __name__ == "__main__":
    main("memory", body)
