"""Predictions as a table."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_dflash.bench.simulate.predict import Prediction
from sglang_dflash.bench.tables import MISSING, Table

TOLERANCE = 0.10


def prediction_table(predictions: Iterable[Prediction], source: str) -> Table:
    """One line per cell and arm; what is off by more than the tolerance is marked."""
    rows = []
    for p in predictions:
        ratio = p.ratio
        beside = [MISSING, MISSING]
        if p.measured is not None and ratio is not None:
            beside = [f"{p.measured:.1f}", f"{ratio:.2f}{' !' if abs(ratio - 1) > TOLERANCE else ''}"]
        figures = [f"{p.outcome.tokens_per_s:.1f}", f"{p.over_plain:.2f}x"]
        shape = [f"{p.outcome.mean_width:.1f}", f"{p.outcome.accept_length:.2f}"]
        rows.append([p.arm, p.cell.task, str(p.cell.concurrency), *figures, *shape, *beside])
    return Table(
        "Predicted from steps of random widths",
        f"replay of {source}: output tokens/s and over plain decoding, which is predicted as width 1 of our worker; "
        f"mean block width; accepted drafts + bonus per block; measured output tokens/s of the same arm, and predicted "
        f"over measured, ! if off by more than {TOLERANCE:.0%}",
        ["arm", "task", "c", "tok/s", "over plain", "width", "accept", "measured", "predicted / measured"],
        rows,
    )
