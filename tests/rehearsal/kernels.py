"""Every Triton kernel of a step compiled as it is launched: ``python -m tests.rehearsal.kernels`` prints the table.

No GPU is needed. A process per architecture calls the launchers of this package and of SGLang at the published pairs'
shapes, on tensors without storage, under Triton's warm-up; see tests/ops/launches.py. Autotuned kernels are
compiled with their first configuration.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

CAPABILITIES = (90, 100, 120)
TP_SIZES = (1, 2, 4, 8)
PROCESSES = 2


@dataclass(frozen=True)
class Row:
    """One compilation.

    Attributes:
        owner: ``ours`` or ``SGLang``.
        registers, stack: a thread's; bytes of stack are spills.
        shared: bytes of a block; ``fits`` says whether the architecture has them.
        places: pairs, ranks and roads that launch it.
    """

    capability: int
    owner: str
    kernel: str
    registers: int
    stack: int
    shared: int
    fits: bool
    places: str


def compile_all(tp_sizes: tuple[int, ...] = TP_SIZES, capabilities: tuple[int, ...] = CAPABILITIES) -> list[Row]:
    """Every compilation for every architecture. Triton keeps them (``TRITON_CACHE_DIR``): a second run is short."""
    os.environ.pop("TRITON_INTERPRET", None)
    context = multiprocessing.get_context("spawn")  # what SGLang decides at import, it decides once for a process
    with ProcessPoolExecutor(PROCESSES, mp_context=context, max_tasks_per_child=1) as pool:
        parts = pool.map(partial(compile_for, tp_sizes=tp_sizes), capabilities)
        return [row for part in parts for row in part]


def compile_for(capability: int, *, tp_sizes: tuple[int, ...]) -> list[Row]:
    """Every compilation for one architecture; only in a process of its own."""
    from tests.rehearsal.kernels_device import pretend

    pretend(capability)
    from tests.ops.launches import SHARED_MEMORY, Launch, compiled_for
    from tests.rehearsal import kernels_ours, kernels_sglang
    from tests.rehearsal.kernels_pairs import rank_shapes

    roads = {
        "ours": partial(kernels_ours.launch_ours, bs=16, width=16),
        # Some launchers take narrower tiles for few requests.
        "verify": partial(kernels_sglang.launch_verify, bs=16, width=16),
        "verify, 128 requests": partial(kernels_sglang.launch_verify, bs=128, width=16),
        "replay": partial(kernels_sglang.launch_replay, bs=16, width=16),
        "decode, 1 request": partial(kernels_sglang.launch_decode, bs=1),
        "decode": partial(kernels_sglang.launch_decode, bs=16),
        "prefill": kernels_sglang.launch_prefill,
        "slots": partial(kernels_sglang.launch_slots, bs=16),
    }
    found: dict[str, tuple[str, Launch, list[str]]] = {}
    for shapes in rank_shapes(tp_sizes):
        for road, launch_all in roads.items():
            with compiled_for(capability) as launches:
                try:
                    launch_all(shapes)
                except Exception as error:
                    error.add_note(f"sm_{capability}, {shapes}, {road}, after {[launch.kernel for launch in launches]}")
                    raise
            owner = "ours" if road == "ours" else "SGLang"
            for launch in {launch.key: launch for launch in launches}.values():
                found.setdefault(launch.key, (owner, launch, []))[2].append(f"{shapes} {road}")
    return [
        Row(
            capability,
            owner,
            launch.kernel,
            **asdict(launch.usage),
            fits=launch.usage.shared <= SHARED_MEMORY[capability],
            places="; ".join(places),
        )
        for owner, launch, places in found.values()
    ]


def table(rows: list[Row]) -> Iterator[str]:
    """A line a kernel: how often it was compiled, and the most that a compilation takes, for each architecture."""
    capabilities = sorted({row.capability for row in rows})
    targets = " / ".join(f"sm_{capability}" for capability in capabilities)
    yield f"| kernel | compilations | registers {targets} | stack bytes | shared bytes |"
    yield "|---|---|---|---|---|"

    def name(row: Row) -> tuple[str, str]:
        return row.owner != "ours", row.kernel

    for _, group in groupby(sorted(rows, key=name), key=name):
        found = list(group)

        def most(field: str, found: list[Row] = found) -> str:
            parts = [[getattr(row, field) for row in found if row.capability == it] for it in capabilities]
            values = [max(part, default="-") for part in parts]
            return str(values[0]) if len(set(values)) == 1 else " / ".join(map(str, values))

        label = found[0].kernel if found[0].owner == "SGLang" else f"**{found[0].kernel}**"
        yield f"| {label} | {len(found)} | {most('registers')} | {most('stack')} | {most('shared')} |"


def problems(rows: list[Row]) -> Iterator[str]:
    """A line a compilation that spills, or asks for more shared memory than the architecture has."""
    for row in rows:
        if row.stack or not row.fits:
            used = f"{row.registers} registers, {row.stack} bytes of stack, {row.shared} of shared memory"
            yield f"sm_{row.capability} {row.kernel}: {used}{'' if row.fits else ', which is too much'}: {row.places}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, nargs="+", default=TP_SIZES, help="tensor-parallel sizes")
    parser.add_argument("--sm", type=int, nargs="+", default=CAPABILITIES, help="architectures")
    parser.add_argument("--csv", type=Path, help="file for a line a compilation")
    arguments = parser.parse_args()
    start = time.perf_counter()
    rows = compile_all(tuple(arguments.tp), tuple(arguments.sm))
    print(*table(rows), "", *problems(rows), sep="\n")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    cpu = sum(os.times()[:4])
    print(f"\n{len(rows)} compilations, {cpu:.0f} s of CPU time, {time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
