"""What a 27B takes by default, on the tiny hybrid: states replayed by our kernels in graphs, in bfloat16."""

from __future__ import annotations

from sglang_dflash.states.choice import SWITCH
from tests.support.pair_servers import RANDOM_WIDTHS, WIDE
from tools.gpu.compare import Arm, compare
from tools.gpu.run_step import Run, main

REPLAY = ((SWITCH, "1"),)
PAIR = "tiny-hybrid"
ARMS = {
    "graphs": Arm(variables=REPLAY),
    "widths at random": Arm((*RANDOM_WIDTHS, *WIDE), REPLAY),
    "prefix hits": Arm(
        ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64"), REPLAY, cached=True
    ),
    "padding rows": Arm(("--cuda-graph-bs-decode", "3"), REPLAY),
    "draft window": Arm(("--speculative-draft-window-size", "64"), REPLAY),
    "widths, prefix hits, window": Arm(
        (
            *RANDOM_WIDTHS,
            *("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64"),
            *("--speculative-draft-window-size", "24"),  # a hit ends a window early
        ),
        REPLAY,
        cached=True,
    ),
}


def body(run: Run) -> bool:
    return compare(run, PAIR, ARMS)


if __name__ == "__main__":
    main("replay", body)
