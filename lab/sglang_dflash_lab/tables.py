"""Tables of text cells, for terminals and Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """A table; ``caption`` defines its columns. Rows of another length are a ValueError."""

    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cell(s) under {len(self.columns)} headings: {row}")

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def print(self, console: Console) -> None:
        table = RichTable(title=self.title, caption=self.caption, title_justify="left", caption_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)


def wide_console() -> Console:
    """Return the terminal, or a console wide enough for every table."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=180)
