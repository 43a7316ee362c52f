"""``sglang-dflash bench`` and ``sglang-dflash report``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from sglang_dflash.check import user_errors
from sglang_dflash.errors import DFlashError

_INTERRUPTED = 130
_URL = re.compile(r"(?:(?P<mode>.+)=)?(?P<url>https?://.+)")


def bench(
    pair: Annotated[str | None, Option(help="A tiny pair (tiny-hybrid, …) or a card's (Qwen3.5-4B, …).")] = None,
    target: Annotated[str | None, Option(help="Path or hub name of a target, in place of the pair's.")] = None,
    draft: Annotated[str | None, Option(help="Path or hub name of a drafter, in place of the pair's.")] = None,
    drafter: Annotated[str, Option(help="Kind of a tiny pair's drafter: good, noisy, weak, swa, …")] = "good",
    modes: Annotated[str, Option(help="Comma-separated arms.")] = "ar,dflash:8,dflash:16",
    tasks: Annotated[str, Option(help="Comma-separated task names or JSON-lines files.")] = "math,code,json,chat",
    concurrency: Annotated[str, Option(help="Comma-separated numbers of requests in flight.")] = "1,8",
    num_prompts: Annotated[int, Option(min=1, help="Prompts per run.")] = 32,
    repeats: Annotated[int, Option(min=1, help="Runs of each cell; three or more give an interval.")] = 5,
    max_tokens: Annotated[int | None, Option(help="Maximum tokens per answer; default: 4096, tiny pairs 512.")] = None,
    temperature: Annotated[float, Option(min=0.0, help="0 is greedy, as on the cards.")] = 0.0,
    thinking: Annotated[bool | None, Option(help="The chat template's switch; default: off for a tiny pair.")] = None,
    seed: Annotated[int, Option(help="Random seed for prompt selection.")] = 0,
    base_url: Annotated[list[str] | None, Option(help="Measure running servers: [MODE=]URL for each mode.")] = None,
    together: Annotated[
        bool | None, Option("--together/--one-at-a-time", help="Run all servers at once; default: for a tiny pair.")
    ] = None,
    server_args: Annotated[str, Option(help="Additional arguments of every server, as one string.")] = "",
    out: Annotated[Path, Option(help="Results folder; the same command resumes.")] = Path("bench-results"),
) -> None:
    """Measure plain decoding, DFLASH and others on real servers with SGLang's load generator.

    Every answer is compared with plain decoding's. Ctrl-C keeps the finished runs; the same command resumes.

    Modes: ar, or dflash, adaptive, copies, best or builtin with :BLOCK; +NAME=VALUE after a mode sets an
    environment variable of its server.

    Tasks: those of the tiny pairs, or JSON-lines files whose rows have `messages`, `turns` (the first is asked),
    `question`, `problem`, `prompt`, or `instruction` and `input`. docs/benchmark.md has the command that writes the
    cards' tasks with z-lab's package `dflash`.

    Example: sglang-dflash bench --pair Qwen3.5-4B --modes ar,dflash:16
    """
    with user_errors():
        from sglang_dflash_lab.bench.arms import Pair, find_pair, parse_arms
        from sglang_dflash_lab.bench.figures import print_results
        from sglang_dflash_lab.bench.session import Settings, run
        from sglang_dflash_lab.pairs import NAMES
        from sglang_dflash_lab.tables import wide_console

        arms = parse_arms(modes)
        urls = base_urls(base_url or [], [arm.label for arm in arms])
        served = Pair("", None) if urls and pair is None and target is None else find_pair(pair, target, draft, drafter)
        settings = Settings(
            *(served, arms, tasks.split(","), numbers(concurrency), num_prompts, repeats),
            *(out, max_tokens or served.max_tokens, temperature, served.thinking if thinking is None else thinking),
            *(seed, served.name in NAMES if together is None else together, tuple(shlex.split(server_args)), urls),
        )
        console, status = wide_console(), 0
        try:
            run(settings, console.print)
        except KeyboardInterrupt:
            status = _INTERRUPTED
            console.print("interrupted: the tables show the finished runs")
        print_results(out, console)
    raise typer.Exit(status)


def report(folder: Annotated[Path, Argument(help="Results folder (the benchmark's --out).")]) -> None:
    """Write an HTML page, Markdown tables and a CSV file into a benchmark's results folder.

    Example: sglang-dflash report bench-results
    """
    with user_errors():
        from sglang_dflash_lab.bench.report import write_report

        typer.echo(write_report(folder))


def numbers(text: str) -> list[int]:
    """Read comma-separated positive numbers, else raise a DFlashError."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise DFlashError(f"--concurrency {text!r} is invalid", remedy="use, e.g., 1,8")
    return [int(part) for part in text.split(",")]


def base_urls(texts: list[str], labels: list[str]) -> dict[str, str]:
    """Read ``--base-url`` options as URL by arm (empty for none); raise a DFlashError unless each arm has one."""
    found: dict[str, str] = {}
    for text in texts:
        if match := _URL.fullmatch(text):
            found[match["mode"] or labels[0]] = match["url"].rstrip("/")
    if texts and (len(found) < len(texts) or found.keys() != set(labels)):
        raise DFlashError(
            f"--base-url {' '.join(texts)} does not match --modes",
            remedy=f"give --base-url MODE=URL for each of {', '.join(labels)}, or one URL for a single mode",
        )
    return found
