"""Predictions as a table."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_dflash.bench.simulate.predict import Prediction
from sglang_dflash.bench.tables import MISSING, Table, number

TOLERANCE = 0.10


def prediction_table(predictions: Iterable[Prediction], source: str) -> Table:
    """One line per cell and arm; what is off by more than the tolerance is marked."""
    rows = []
    for p in predictions:
        ratio = p.ratio
        beside = [MISSING] * 3
        if p.measured is not None and ratio is not None:
            mark = " !" if abs(ratio - 1) > TOLERANCE else ""
            beside = [number(p.measured.accept_length), f"{p.measured.tokens_per_s:.1f}", f"{ratio:.2f}{mark}"]
        figures = [f"{p.outcome.tokens_per_s:.1f}", f"{p.over_plain:.2f}x"]
        shape = [f"{p.outcome.mean_width:.1f}", f"{p.outcome.accept_length:.2f}"]
        rows.append([p.arm, p.cell.task, str(p.cell.concurrency), *figures, *shape, *beside])
    return Table(
        "Predicted from steps of random widths",
        f"replay of {source}: output tokens/s; over plain decoding, which is predicted as width 1 of our worker; mean "
        f"block width; micro accept length. Measured: the same arm's accept length and tokens/s; ratio: predicted over "
        f"measured tokens/s, ! if off by more than {TOLERANCE:.0%}",
        ["arm", "task", "c", "tok/s", "over plain", "width", "accept", "measured accept", "measured tok/s", "ratio"],
        rows,
    )
