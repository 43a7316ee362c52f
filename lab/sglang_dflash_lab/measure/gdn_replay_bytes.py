"""Count bytes and flops of a gated delta net's verify and commit, three ways: ``… measure.gdn_replay_bytes``.

Arithmetic only; nothing is run. Bytes are device-memory traffic, each tensor once per launch: further reads hit the
cache. A product of two parts counts as two, one of TF32 in three parts as three.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator

from sglang_dflash_lab.tables import Table

HALF, FULL = 2, 4  # bytes of an activation and of a state's element
BANDWIDTH = 3.35e12  # bytes per second, an H100's
H, HV, K, V, T = 16, 48, 128, 128, 16  # a layer of Qwen3.5-27B and Qwen3.6-27B on one rank, block T

STATE = HV * V * K * FULL
# Queries, keys, values, the inputs of two gates, and the outputs.
ACTIVATIONS = T * (2 * H * K + 2 * HV * V + 2 * HV) * HALF
# Updates and keys in two parts each, and decays.
RECORDS = T * (2 * (HV * V + H * K) * HALF + HV * FULL)
PRODUCT = 2 * T * K * V * HV  # flops of a block's vectors against the states of all heads
SCALE = STATE // FULL * 2  # flops of the state's decay


def between(width: int) -> int:
    """Return the flops of a block's vectors of ``width`` against as many others, in all value heads."""
    return 2 * T * T * width * HV


Way = tuple[str, int, int, int, int]  # name; bytes of verify and commit; flops of verify and commit


def ways() -> Iterator[Way]:
    """Yield each way for one request in one layer. SGLang's ring of 16 positions folds every block, without history."""
    # Per token: the state's decay, what it erases, a write, an output.
    recurrence = T * 7 * HV * V * K
    yield "snapshots", ACTIVATIONS + (1 + T) * STATE, 2 * STATE, recurrence, 0
    # Two tiles of values form the products of keys each, and those with the empty history.
    ring = 2 * PRODUCT + 2 * (2 + 2) * between(K) + (2 + 2) * between(V)
    yield "SGLang's ring", ACTIVATIONS + STATE + RECORDS, 2 * STATE + RECORDS, ring, 4 * PRODUCT + SCALE
    tiles = V // 32
    inverse = tiles * 6 * 3 * between(T)
    ours = 2 * 2 * PRODUCT + tiles * 2 * between(K) + inverse + 3 * 2 * between(V)
    yield "ours", ACTIVATIONS + STATE + RECORDS, 2 * STATE + RECORDS, ours, 3 * PRODUCT + SCALE


def table(batches: tuple[int, ...] = (8, 32)) -> Table:
    rows = []
    for batch in batches:
        for name, verify_bytes, commit_bytes, *flops in ways():
            moved = verify_bytes + commit_bytes
            megabytes = (f"{batch * count / 1e6:.0f}" for count in (verify_bytes, commit_bytes, moved))
            gigaflops = (f"{batch * count / 1e9:.2f}" for count in flops)
            rows.append([str(batch), name, *megabytes, f"{batch * moved / BANDWIDTH * 1e6:.0f}", *gigaflops])
    heads = ["MB, verify", "commit", "both", "least µs at 3.35 TB/s", "GFLOP, verify", "commit"]
    return Table("A layer and step", "27B, one rank, block 16", ["requests", "way", *heads], rows)


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    print(table().markdown())
