"""One self-contained HTML page of a results folder; its figures also as PNG, its tables as Markdown and CSV."""

from __future__ import annotations

import base64
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.plots import all_plots
from sglang_dflash_lab.bench.provenance import describe_hardware
from sglang_dflash_lab.bench.published import card_of, published_tables
from sglang_dflash_lab.bench.summary import Summary
from sglang_dflash_lab.bench.tables import all_tables
from sglang_dflash_lab.bench.warnings import findings

PAGE, TABLES, ROWS = "report.html", "tables.md", "summary.csv"


def write_report(folder: Path) -> Path:
    """Write ``report.html``, ``tables.md``, ``summary.csv`` and the PNG files into the results folder; -> the page.

    Raises:
        DFlashError: the folder has no finished run.
    """
    summary = Summary(results.read_finished(folder))
    pictures = []
    for name, caption, figure in all_plots(summary):
        png = folder / f"{name}.png"
        figure.savefig(png, dpi=130)
        data = base64.b64encode(png.read_bytes()).decode()
        pictures.append({"name": name, "caption": caption, "base64": data})
    summary.write_csv(folder / ROWS)
    (folder / TABLES).write_text(markdown(summary))
    page = folder / PAGE
    page.write_text(render(summary, pictures))
    return page


def render(summary: Summary, pictures: list[dict[str, str]]) -> str:
    """The page as text: no script, no link to anything it needs."""
    card = card_of(summary)
    last = summary.results.provenance[-1]
    environment = Environment(
        loader=PackageLoader("sglang_dflash_lab.bench"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html").render(
        settings=last["settings"],
        hardware=describe_hardware(last["hardware"]),
        versions=last["versions"],
        findings=findings(summary),
        tables=all_tables(summary),
        published=published_tables(summary, card) if card else [],
        pictures=pictures,
        provenance=summary.results.provenance,
        servers=summary.results.servers,
    )


def markdown(summary: Summary) -> str:
    """The tables under the command that measured them, for a repository's documentation."""
    last = summary.results.provenance[-1]
    versions = last["versions"]
    head = (
        f"```bash\n{last['command']}\n```\n\n{describe_hardware(last['hardware'])}; SGLang {versions['sglang']}, "
        f"sglang-dflash {versions['sglang-dflash']} at {last['commit']}, {last['time']}.\n"
    )
    found = "".join(f"* {finding.text}\n" for finding in findings(summary))
    tables = [f"### {table.title}\n\n{table.markdown()}\n\n{table.caption}\n" for table in all_tables(summary)]
    return "\n".join([head, *([found] if found else []), *tables])
