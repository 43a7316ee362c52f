"""The tiny pairs in the real engine, bfloat16: eager, as graphs, at random widths, and SGLang's own worker."""

from __future__ import annotations

from sglang_dflash.copies.choice import SWITCH as COPIES
from tests.support.pair_servers import RANDOM_WIDTHS, WIDE
from tools.gpu.compare import EAGER, Arm, compare
from tools.gpu.run_step import TINY_PAIRS, Run, main

ARMS = {
    "graphs": Arm(),
    "eager": Arm(EAGER),
    "graphs, no overlap": Arm(("--disable-overlap-schedule",)),
    "graphs, widths at random and copies": Arm((*RANDOM_WIDTHS, *WIDE)),
    "eager, widths at random and copies": Arm((*RANDOM_WIDTHS, *EAGER)),
    "graphs, copies": Arm(variables=((COPIES, "1"),)),
    "builtin": Arm(ours=False),
}


def body(run: Run) -> bool:
    passed = [compare(run, pair, ARMS) for pair in run.pairs or TINY_PAIRS]  # all of them, whatever goes wrong
    return all(passed)


if __name__ == "__main__":
    main("engine", body)
