"""The soak's report: a table of promises, what was asked, and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.report import STYLE
from sglang_dflash_lab.tables import Table
from tests.soak.catalogue import Entry
from tests.soak.load import Load
from tests.soak.verdict import Promise


def text(command: str, load: Load, entries: Sequence[Entry], promises: Sequence[Promise]) -> str:
    fates = Counter(outcome.fate for outcome in load.outcomes)
    kinds = Counter(entries[outcome.entry].kind for outcome in load.outcomes)
    rows = [[promise.what, "yes" if promise.held else "**no**", promise.found] for promise in promises]
    lines = [
        f"`{command}`, {describe_hardware(hardware())}: {len(load.outcomes)} requests in {load.seconds / 60:.0f} min.",
        "",
        Table("", "", ["promise", "held", "found"], rows).markdown(),
        "",
        f"Asked: {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))}. "
        f"Fates: {', '.join(f'{fate} {count}' for fate, count in sorted(fates.items()))}.",
        "",
    ]
    return "\n".join(lines)


def plot(load: Load, path: Path) -> None:
    """Memory, K/V in use and the speed of the same requests, over the requests done."""
    done = [sample.done for sample in load.samples]
    with plt.rc_context(STYLE):
        figure, (memory, usage, speed) = plt.subplots(3, 1, figsize=(8, 6), sharex=True, layout="constrained")
        memory.plot(done, [sample.rss for sample in load.samples], linewidth=0.8)
        memory.set_ylabel("MiB of all processes")
        usage.plot(done, [sample.kv_usage for sample in load.samples], linewidth=0.5)
        usage.set(ylabel="share of K/V in use", ylim=(0, 1))
        speed.plot(np.linspace(0, len(load.outcomes), len(load.speeds)), load.speeds, "o-")
        speed.set(ylabel="tok/s of one same load", xlabel="requests done", ylim=(0, None))
        figure.savefig(path, dpi=110)
        plt.close(figure)
