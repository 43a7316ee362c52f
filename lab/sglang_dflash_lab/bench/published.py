"""The figures that the model cards publish, beside the measured ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dflash.drafter.published import published_pairs
from sglang_dflash_lab.bench.modes import AR
from sglang_dflash_lab.bench.summary import Summary
from sglang_dflash_lab.bench.tables import MISSING, Table, number


@dataclass(frozen=True)
class Card:
    """A pair's published figures, by our names of the arms.

    Attributes:
        setup: how it was measured.
        speed: tokens/s and speed-up over plain decoding, by mode, task and concurrency.
        accept_length: by mode and task.
    """

    setup: str
    speed: dict[tuple[str, str, int], tuple[float, float]]
    accept_length: dict[tuple[str, str], float]


def card_of(summary: Summary) -> Card | None:
    """The card of the measured pair; None for a pair that has none."""
    card = published_pairs().get(summary.results.provenance[-1]["settings"]["pair"])
    if card is None:
        return None
    return Card(
        f"published: {card['hardware'] or 'hardware not stated'}; {card['setup']}; {card['card']}",
        {
            (mode_of(row), row["task"], row["concurrency"]): (row["tokens_per_s"], row["speedup"])
            for row in card["speed"]
        },
        {(mode_of(row), row["task"]): row["accept_length"] for row in card["accept"]},
    )


def mode_of(row: dict[str, Any]) -> str:
    """A card's arm by our names: its MTP columns count the verified block, ours the draft steps."""
    if row["arm"] == AR:
        return AR
    return f"mtp:{row['block'] - 1}" if row["arm"] == "mtp" else f"{row['arm']}:{row['block']}"


def published_tables(summary: Summary, card: Card) -> list[Table]:
    """Speed and accept length, measured beside published, for every arm and cell that the card has."""
    speed = []
    for (mode, task, concurrency), (tokens_per_s, speed_up) in card.speed.items():
        row = summary.row(mode, task, concurrency)
        measured = [f"{row.throughput:.1f}", f"{number(row.speed_up)}x"] if row else [MISSING, MISSING]
        speed.append([mode, task, str(concurrency), *measured, f"{tokens_per_s:.1f}", f"{speed_up:.2f}x"])
    accept = []
    for (mode, task), length in card.accept_length.items():
        lengths = [row.accept_macro for row in summary.rows if (row.mode, row.task) == (mode, task)]
        accept.append([mode, task, number(sum(lengths) / len(lengths)) if lengths else MISSING, f"{length:.2f}"])
    columns = ["mode", "task", "c", "tok/s", "speed-up", "card tok/s", "card speed-up"]
    tables = [
        Table("Speed beside the card's", card.setup, columns, speed),
        Table("Accept length beside the card's", card.setup, ["mode", "task", "accept length", "card"], accept),
    ]
    return [table for table in tables if table.rows]
