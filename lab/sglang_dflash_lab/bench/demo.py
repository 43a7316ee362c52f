"""``make demo``: stock SGLang answers the same questions with DFLASH and without; ``FULL=1``: more models and tasks."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import OpenAI
from rich import get_console
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from sglang_dflash.check import user_errors
from sglang_dflash_lab.bench import session, tasks
from sglang_dflash_lab.bench.arms import AR, find_pair, parse_arms
from sglang_dflash_lab.bench.figures import Summary, conclusion, print_results
from sglang_dflash_lab.bench.server import starting
from sglang_dflash_lab.bench.session import Settings
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.tables import wide_console

DFLASH, BEST = "dflash:16", "best:16"
TITLES = {AR: "plain decoding (ar)", DFLASH: f"DFLASH ({DFLASH})"}
SHOWN, OTHERS, FORKS = "tiny-hybrid", ("tiny-moe", "tiny-dense"), "tiny-forks"
REQUEST: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 256, "stream": True}
REQUEST["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
REQUEST["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}


def demo(console: Console, settings: Settings, full: bool) -> None:
    for name in (*OTHERS, SHOWN) if full else (SHOWN,):
        settings = replace(settings, pair=find_pair(name, None, None))
        answers, start = [], time.perf_counter()
        with ExitStack() as stack:
            for arm in settings.arms:
                launch, log = settings.launch(arm), settings.out / "logs" / f"{name}-{arm.kind}.log"
                console.print(escape(f"$ {launch.describe()}".replace(f"{Path.cwd()}/", "")), highlight=False)
                answers.append(stack.enter_context(starting(launch, log)))
            urls = {label: answer() for label, answer in zip(TITLES, answers, strict=True)}
            console.print(f"Both servers answer after {time.perf_counter() - start:.0f} s.\n", highlight=False)
            for task in TASKS if full else ("code",):
                race(console, prompts(task, shape="single")[3].messages, [*urls.values()])
            if name == SHOWN:
                session.run(replace(settings, base_urls=urls), lambda line: console.print(line, highlight=False))
    if full:
        show_sampled(console, settings)
        print_results(settings.out, wide_console())
    else:
        console.print("", *conclusion(Summary(settings.out)), sep="\n", style="bold", highlight=False, soft_wrap=True)


def race(console: Console, messages: tuple[dict[str, str], ...], base_urls: list[str]) -> None:
    """Show the servers' answers while they write them, at the same time."""
    console.print(f"[bold]user[/bold] {escape(messages[-1]['content'])}", highlight=False)
    answers = [Panel("", title=title, title_align="left") for title in TITLES.values()]
    table = Table.grid(*("" for _ in answers), expand=True)
    table.add_row(*answers)
    with Live(table, console=console, refresh_per_second=20), ThreadPoolExecutor() as pool:
        list(pool.map(stream, answers, base_urls, [messages] * len(answers)))
    identical = len({answer.renderable for answer in answers}) == 1
    console.print("\nThe answers are identical.\n" if identical else "\n[red]The answers differ.\n")


def stream(answer: Panel, base_url: str, messages: tuple[dict[str, str], ...]) -> None:
    with OpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
        text, start = "", time.perf_counter()
        parts: Any = client.chat.completions.create(**{**REQUEST, "messages": messages})
        for part in parts:
            text += "".join(choice.delta.content or "" for choice in part.choices)
            seconds, tokens = time.perf_counter() - start, part.usage.completion_tokens if part.usage else 0
            answer.renderable, answer.subtitle = escape(text), f"{seconds:.2f} s, {tokens / seconds:.0f} tokens/s"


def show_sampled(console: Console, settings: Settings) -> None:
    """Show what the target's random numbers in unsure drafts are worth, by the accept lengths of sampled requests."""
    pair, arms = find_pair(FORKS, None, None), parse_arms(f"{DFLASH},{BEST}")
    sampled = replace(settings, pair=pair, arms=arms, temperature=0.7, concurrencies=[1], out=settings.out / "sampled")
    console.print(
        f"\n{FORKS} at temperature 0.7; {BEST} drafts the likeliest tokens, without the target's random numbers"
    )
    session.run(sampled, console.print)
    print_results(sampled.out, wide_console())


def main(
    full: Annotated[bool, typer.Option(help="Three models, all tasks, five runs, sampled requests.")] = False,
) -> None:
    """Serve a small model with DFLASH and without, and compare answers and speed."""
    with user_errors():
        folder = Path(tempfile.mkdtemp(prefix="sglang-dflash-demo-"))  # kept: logs and rows
        pair, arms, repeats = find_pair(SHOWN, None, None), parse_arms(f"{AR},{DFLASH}"), 5 if full else 1
        settings = Settings(pair, arms, [tasks.QUESTIONS], [1, 8], 32, repeats, folder, thinking=False)
        demo(get_console(), settings, full)


if __name__ == "__main__":
    typer.run(main)
