"""Count bytes and flops of a gated delta net's verify and commit, three ways: ``… measure.gdn_replay_bytes``.

Arithmetic, nothing is run. Bytes are those of device memory, each tensor once a launch: what programs of one launch
read again comes from the cache. A product of two parts counts as two, one of TF32 in three parts as three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_dflash_lab.tables import Table

HALF, FULL = 2, 4  # bytes of an activation and of a state's number
BANDWIDTH = 3.35e12  # bytes per second, an H100's


@dataclass(frozen=True)
class Layer:
    """Of Qwen3.5-27B and Qwen3.6-27B, on one rank; a block of T."""

    H: int = 16
    HV: int = 48
    K: int = 128
    V: int = 128
    T: int = 16

    @property
    def state(self) -> int:
        return self.HV * self.V * self.K * FULL

    @property
    def activations(self) -> int:
        """Queries, keys, values, the inputs of two gates, and the outputs."""
        return self.T * (2 * self.H * self.K + 2 * self.HV * self.V + 2 * self.HV) * HALF

    @property
    def records(self) -> int:
        """Updates and keys in two parts each, and decays."""
        return self.T * (2 * (self.HV * self.V + self.H * self.K) * HALF + self.HV * FULL)

    @property
    def product(self) -> int:
        """Flops of a block's vectors against the states of all heads."""
        return 2 * self.T * self.K * self.V * self.HV

    def between(self, width: int) -> int:
        """Flops of a block's vectors of ``width`` against as many others, in all value heads."""
        return 2 * self.T * self.T * width * self.HV


@dataclass(frozen=True)
class Way:
    """Bytes and flops of one request in one layer."""

    name: str
    verify_bytes: int
    commit_bytes: int
    verify_flops: int
    commit_flops: int


def ways(of: Layer) -> Iterator[Way]:
    """Where SGLang's ring has 16 positions every block is folded, so its history is empty."""
    state, inputs, records = of.state, of.activations, of.records
    scale = state // FULL * 2  # multiply and add of a state to what it decays to
    # A token: the state's decay, what it erases, a write, an output.
    recurrence = of.T * 7 * of.HV * of.V * of.K
    yield Way("snapshots", inputs + (1 + of.T) * state, 2 * state, recurrence, 0)
    # Two tiles of values form the products of keys each; those with the empty history are formed too.
    ring = 2 * of.product + 2 * (2 + 2) * of.between(of.K) + (2 + 2) * of.between(of.V)
    yield Way("SGLang's ring", inputs + state + records, 2 * state + records, ring, 4 * of.product + scale)
    tiles = of.V // 32
    inverse = tiles * 6 * 3 * of.between(of.T)
    ours = 2 * 2 * of.product + tiles * 2 * of.between(of.K) + inverse + 3 * 2 * of.between(of.V)
    yield Way("ours", inputs + state + records, 2 * state + records, ours, 3 * of.product + scale)


def table(of: Layer, batches: tuple[int, ...] = (8, 32)) -> Table:
    rows = []
    for batch in batches:
        for way in ways(of):
            moved = way.verify_bytes + way.commit_bytes
            megabytes = (f"{batch * count / 1e6:.0f}" for count in (way.verify_bytes, way.commit_bytes, moved))
            gigaflops = (f"{batch * count / 1e9:.2f}" for count in (way.verify_flops, way.commit_flops))
            floor = batch * moved / BANDWIDTH * 1e6
            rows.append([str(batch), way.name, *megabytes, f"{floor:.0f}", *gigaflops])
    heads = ["MB, verify", "commit", "both", "least µs at 3.35 TB/s", "GFLOP, verify", "commit"]
    return Table("A layer and step", "27B, one rank, block 16", ["requests", "way", *heads], rows)


if __name__ == "__main__":
    print(table(Layer()).markdown())
