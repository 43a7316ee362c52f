"""Figures of the documents: predictions are those of ``check``, the cards' are published, others are on their page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash.check.report import TITLE
from sglang_dflash.plan.division import TOKENS_PER_REQUEST, size
from tests.plan.commands import FOLDER as COMMANDS
from tests.support.cards import FOLDER

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SETTINGS = ROOT / "docs/settings.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs/results/sglang-worker.md"]
PUBLISHED = json.loads((ROOT / "sglang_dflash/check/published.json").read_text())
GPUS = {"rtx5090": 0.9, "l40s": 0.9, "h100": 0.9, "rtx-pro-6000": 0.9, "dgx-spark": 0.8, "h200": 0.9}
OTHERS = {  # of README's pairs that are no cards: configurations in tests/fixtures/commands
    "Qwen3.8-27B": ("qwen38-27b", "qwen38-27b-dflash2"),
    "Qwen3.8-27B-FP8": ("qwen38-27b-fp8", "qwen38-27b-dflash2"),
    "Qwen3.8-27B-NVFP4": ("qwen38-27b-nvfp4", "qwen38-27b-dflash2"),
    "Qwen3.5-9B": ("ornith15-9b", "qwen35-9b-dflash"),
    "Ornith-1.5-35B-A3B": ("ornith15-35b-a3b", "ornith15-35b-dflash2"),
    "Qwen3-8B": ("qwen3-8b", "qwen3-8b-dflash"),
    "Qwen3-Coder-30B-A3B": ("qwen3-coder-30b-a3b", "qwen3-coder-30b-dflash"),
}
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-])(?: [KMG]iB)?")


@cache
def check(name: str, *flags: str) -> dict[str, Any]:
    """What ``sglang-dflash check --json`` prints for a published pair's configurations."""
    pair = [str(FOLDER / name / part) for part in ("target", "drafter")]
    if name in OTHERS:
        pair = [str(COMMANDS / part) for part in OTHERS[name]]
    return json.loads(CliRunner().invoke(app, ["check", *pair, "--json", *flags]).stdout)


def rows(text: str) -> Iterator[list[str]]:
    """Cells of each table row, without headings."""
    for row in re.findall(r"(?m)^\| (.*) \|$", text):
        yield [cell.strip() for cell in row.split("|")]


def tables(page: Path, heading: str) -> str:
    """A section without its subsections."""
    return page.read_text().partition(f"# {heading}\n")[2].partition("\n#")[0]


def running(report: Any) -> list[int]:
    """Requests at once of each division of the memory in a report, the served one first."""
    if isinstance(report, list):
        return [each for value in report for each in running(value)]
    if not isinstance(report, dict):
        return []
    own = [report["running"]] if "replay" in report and "running" in report else []
    return own + running(list(report.values()))


def requests(name: str, *flags: str) -> str:
    """Requests of 8,192 tokens at once."""
    served = check(name, *flags)["memory"]["served"]
    return str(min(served["running"], served["tokens"] // TOKENS_PER_REQUEST) or "–")


PAIRS = [row for row in rows(tables(README, "Pairs")) if row[0].startswith("`")]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].strip("`"))
def test_requests_of_each_pair_on_each_gpu_are_those_of_check(pair: list[str]) -> None:
    targets, *cells = pair
    for name in re.findall("`(.*?)`", targets):
        for (gpu, fraction), cell in zip(GPUS.items(), cells, strict=True):
            assert cell == requests(name, "--gpu", gpu, "--mem-fraction-static", str(fraction)), (name, gpu)


def test_of_coder_next_twelve_requests_fit_on_a_b200() -> None:
    assert "`Qwen3-Coder-Next` needs a B200 (12)" in README.read_text()
    assert requests("Qwen3-Coder-Next", "--gpu", "b200", "--mem-fraction-static", "0.9") == "12"


def speed(name: str, block: int, concurrency: int, task: str = "math500") -> dict[str, Any]:
    [found] = [
        each
        for each in PUBLISHED[name]["speed"]
        if (each["task"], each["arm"], each["block"], each["concurrency"]) == (task, "dflash", block, concurrency)
    ]
    return found


def test_published_figures_are_the_cards() -> None:
    shown = [row for row in rows(tables(README, "Pairs")) if row[0] in PUBLISHED]
    assert shown
    for name, block, *cells in shown:
        for users, cell in zip((1, 8, 16, 32), cells, strict=True):
            assert not cell or cell == f"{speed(name, int(block), users)['speedup']}x", (name, block, users)
    shown = [row for row in rows(tables(SETTINGS, "Block size")) if row[0].isdigit()]
    assert shown
    for users, *cells in shown:
        assert cells == [f"{speed('Qwen3.5-27B', block, int(users))['tokens_per_s']:,.0f}" for block in (16, 8)]


def numbers(value: Any) -> Iterator[str]:
    """Every number of a JSON value as text, and as a size."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield from (f"{value:g}", f"{value:,}", size(value))
    elif isinstance(value, str):
        yield from (f"{int(found):,}" for found in re.findall(r"\d+", value))


def predicted(block: str, *reports: dict[str, Any]) -> None:
    """Every number and every backticked flag of a block is in a report."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", block)
    known = {number for report in reports for number in numbers(report)}
    assert set(NUMBER.findall(prose)) <= known
    flags = [" ".join(span.split()) for span in re.findall(r"`(--[^`]*\d[^`]*)`", block)]
    assert all(any(span in json.dumps(report) for report in reports) for span in flags), flags


MARKED = re.compile(r"<!-- check: (.*) -->\n((?:.+\n)+)")
BLOCKS = [(page.name, *found) for page in PAGES for found in MARKED.findall(page.read_text())]


@pytest.mark.parametrize(
    "_, commands, block", BLOCKS, ids=[f"{name} {index}" for index, (name, *_) in enumerate(BLOCKS)]
)
def test_marked_predictions_are_those_of_check(_: str, commands: str, block: str) -> None:
    """A comment names pairs and flags. A table's row adds its own flags."""
    reports = [check(*command.split()) for command in commands.split("; ")]
    if not block.startswith("|"):
        predicted(block, *reports)
        return
    for flags, *cells in list(rows(block))[1:]:
        added = re.findall(r"`(--.*)`", flags)
        predicted(" ".join(cells), check(*commands.split(), *" ".join(added).split()))


def measured(page: Path) -> Iterator[tuple[str, list[Path]]]:
    """Bold figures with the pages of results that their paragraph or row links to."""
    for block in re.split(r"\n\n|\n(?=[|-])", page.read_text()):
        links = [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+\.md)", block)]
        for figure in re.findall(r"\*\*(\d[\d,.]*)x?\*\*", block):
            yield figure, [link for link in links if link.parent.name == "results"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measured_figures_stand_on_the_page_that_they_link_to(page: Path) -> None:
    for figure, sources in measured(page):
        decimals = len(figure.partition(".")[2])
        known = {
            f"{round(float(found), decimals):.{decimals}f}"
            for source in sources
            for found in re.findall(r"\d+(?:\.\d+)?", source.read_text().replace(",", ""))
        }
        assert figure.replace(",", "") in known, (figure, sources)


# A transcript of `check` in a page, with the pair's hub names; "…" stands for lines that are left out.
TRANSCRIPT = re.compile(r"```console\n\$ sglang-dflash check (Qwen/(\S+)) (\S+) (.*)\n((?:.*\n)+?)```")
TRANSCRIPTS = [found for page in PAGES for found in TRANSCRIPT.findall(page.read_text())]


@pytest.mark.parametrize("target, name, drafter, flags, lines", TRANSCRIPTS, ids=[name for _, name, *_ in TRANSCRIPTS])
def test_transcripts_of_check_are_what_it_prints(target: str, name: str, drafter: str, flags: str, lines: str) -> None:
    pair = [str(FOLDER / name / part) for part in ("target", "drafter")]
    printed = CliRunner().invoke(app, ["check", *pair, *flags.split()]).stdout.splitlines()
    first, *expected = [line for line in lines.splitlines() if line not in ("", "…")]
    title, _, verdict = printed[0].partition(" FITS: ")
    for folder, hub in zip(pair, (target, drafter), strict=True):
        title = title.replace(folder, hub)
    assert first == f"{title.rstrip():{TITLE}} FITS: {verdict}"
    assert expected and set(expected) <= set(printed)
