"""The figures that the model cards publish, beside the measured ones."""

from __future__ import annotations

from typing import Any

from sglang_dflash.bench.settings import published_pairs
from sglang_dflash.bench.summary import Summary
from sglang_dflash.bench.tables import MISSING, Table, number


def card_of(summary: Summary) -> dict[str, Any] | None:
    """The card of the measured pair; None for a pair that has none."""
    name = summary.results.provenance[-1]["settings"]["pair"]
    return published_pairs().get(name)


def mode_of(row: dict[str, Any]) -> str:
    """A card's arm by our names: its MTP columns count the verified block, ours the draft steps."""
    if row["arm"] == "ar":
        return "ar"
    return f"mtp:{row['block'] - 1}" if row["arm"] == "mtp" else f"{row['arm']}:{row['block']}"


def published_speed_up(card: dict[str, Any], mode: str, task: str, concurrency: int) -> float | None:
    for row in card["speed"]:
        if (mode_of(row), row["task"], row["concurrency"]) == (mode, task, concurrency):
            return float(row["speedup"])
    return None


def published_accept_length(card: dict[str, Any], mode: str, task: str) -> float | None:
    for row in card["accept"]:
        if (mode_of(row), row["task"]) == (mode, task):
            return float(row["accept_length"])
    return None


def published_tables(summary: Summary, card: dict[str, Any]) -> list[Table]:
    """Speed and accept length, measured beside published, for every arm and cell that the card has."""
    speed = []
    for row in card["speed"]:
        mine = summary.row(mode_of(row), row["task"], row["concurrency"])
        measured = [f"{mine.throughput:.1f}", f"{number(mine.speed_up)}x"] if mine else [MISSING, MISSING]
        speed.append(
            [
                mode_of(row), row["task"], str(row["concurrency"]), *measured,
                f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}x",
            ]
        )  # fmt: skip
    accept = []
    for row in card["accept"]:
        rows = [r for r in summary.rows if (r.mode, r.task) == (mode_of(row), row["task"])]
        measured = [number(sum(r.accept_macro for r in rows) / len(rows))] if rows else [MISSING]
        accept.append([mode_of(row), row["task"], *measured, f"{row['accept_length']:.2f}"])
    setup = f"published: {card['hardware'] or 'hardware not stated'}; {card['setup']}; {card['card']}"
    tables = []
    if speed:
        columns = ["mode", "task", "c", "tok/s", "speed-up", "card tok/s", "card speed-up"]
        tables.append(Table("Speed beside the card's", setup, columns, speed))
    if accept:
        columns = ["mode", "task", "accept length", "card"]
        tables.append(Table("Accept length beside the card's", setup, columns, accept))
    return tables
