"""Device memory of each tiny pair's server: what our worker reports, and what the device then lacks."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support.pair_servers import worker_info
from tools.gpu.device import used
from tools.gpu.run_step import TINY_PAIRS, Run, main


def body(run: Run) -> bool:
    return run.measure_each(({"pair": pair}, partial(account, run, pair)) for pair in run.pairs or TINY_PAIRS)


def account(run: Run, pair: str) -> dict[str, Any]:
    before = used()
    with run.serve(pair, "--max-total-tokens", "65536") as server:
        parts, after = worker_info(server)["memory_bytes"], used()
    return {"memory_bytes": parts, "sum": sum(parts.values()), "taken": after - before if before else None}


if __name__ == "__main__":
    main("memory", body)
