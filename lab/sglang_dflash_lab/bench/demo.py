"""``make demo``: stock SGLang answers with three small models, then DFLASH beside plain decoding on one of them.

Everything goes through ``python -m sglang.launch_server`` and its HTTP interface.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from openai import AsyncOpenAI
from rich.console import Console
from rich.markup import escape

from sglang_dflash.diagnose.tables import wide_console
from sglang_dflash.user_errors import user_errors
from sglang_dflash_lab.bench import metrics, results, tables
from sglang_dflash_lab.bench.known_pairs import find_pair
from sglang_dflash_lab.bench.modes import AR
from sglang_dflash_lab.bench.options import Options
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import running
from sglang_dflash_lab.bench.servers import Servers
from sglang_dflash_lab.bench.session import Session
from sglang_dflash_lab.bench.settings import Settings, configure
from sglang_dflash_lab.bench.summary import Summary
from sglang_dflash_lab.bench.tasks import offline
from sglang_dflash_lab.pairs import NAMES
from sglang_dflash_lab.pairs.corpus import prompts

PAIR = "tiny-hybrid"
DFLASH = "dflash:16"
CONCURRENCIES = "1,8"
PROMPTS = 32
REPEATS = 5


async def demo(console: Console, settings: Settings) -> None:
    """The whole demonstration; results of the comparison are left in ``settings.out``."""
    for name in NAMES:
        if name != settings.pair.name:
            await plain_answer(console, replace(settings, pair=find_pair(name, None, None)))
    # Stage times cost a clock reading per stage on a CPU, and tell where a step's time goes.
    os.environ.setdefault("SGLANG_DFLASH_STAGE_TIMES", "1")
    async with Servers(settings, lambda line: console.print(f"\n{escape(line)}")) as servers:
        plain, dflash = [(await servers.client(label)).base_url for label in (AR, DFLASH)]
        for task in offline.TASKS:
            await show_answer(console, task, plain, dflash)
        runs = f"{settings.repeats} alternating runs of {settings.num_prompts} single questions"
        console.print(f"\n{runs}, {describe_hardware(hardware())}")
        await Session(replace(settings, base_urls={AR: plain, DFLASH: dflash}), console).measure()
    summary = Summary(results.read_finished(settings.out))
    by_task(summary).print(console)
    for table in tables.all_tables(summary):
        table.print(console)


def by_task(summary: Summary) -> tables.Table:
    """Accept length and accuracy of each kind of question."""
    rows = []
    for task in offline.TASKS:
        requests = [r for r in summary.requests(DFLASH) if r.question.startswith(f"{task}/")]
        accept, right = metrics.accept_length_macro(requests), metrics.accuracy(requests)
        rows.append([task, tables.number(accept), f"{100 * right:.0f} %"])
    return tables.Table(
        "Accept length by task", f"{DFLASH}, mean over answers", ["task", "accept length", "right"], rows
    )


def comparison(pair: str, out: Path, num_prompts: int, repeats: int) -> Settings:
    """Plain decoding against DFLASH at block 16 on single questions of all the tiny pair's own tasks."""
    options = Options(
        pair=pair,
        modes=f"{AR},{DFLASH}",
        tasks=offline.QUESTIONS,
        concurrency=CONCURRENCIES,
        num_prompts=num_prompts,
        repeats=repeats,
        out=out,
    )
    return configure(options)


async def plain_answer(console: Console, settings: Settings) -> None:
    """One chat completion of a target without speculation."""
    launch = settings.launch(settings.modes[0])
    console.print(f"\n[bold]$[/bold] {escape(launch.describe())}")
    async with running(launch, settings.out / "logs" / f"{settings.pair.name}.log") as url:
        question = list(prompts("chat", "heldout", 1, shape="single")[0].messages)
        _print_turn(console, question[-1]["content"], await ask(url, question))


async def show_answer(console: Console, task: str, plain: str, dflash: str) -> None:
    """Ask both servers the same thing and say whether they answer the same."""
    prompt = prompts(task, "heldout", 1, shape="single")[0]
    messages = list(prompt.messages)
    answer, reference = await ask(dflash, messages), await ask(plain, messages)
    _print_turn(console, messages[-1]["content"], answer)
    same = "the same without speculation" if answer == reference else f"[red]without speculation: {escape(reference)}"
    console.print(f"[dim]{task}: {'right' if prompt.check(answer) else 'wrong'}; {same}[/dim]")


async def ask(url: str, messages: list[dict[str, str]]) -> str:
    """The answer to a conversation, through the OpenAI client."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = await client.chat.completions.create(
            model="default",
            messages=messages,  # type: ignore[arg-type]  # plain dictionaries are what the client sends anyway
            temperature=0,
            max_tokens=256,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    return reply.choices[0].message.content or ""


def _print_turn(console: Console, question: str, answer: str) -> None:
    console.print(f"\n[bold]user[/bold]  {escape(question)}")
    console.print(f"[bold]model[/bold] {escape(answer)}")


def main(
    pair: Annotated[str, typer.Option(help=f"The pair to compare on: {', '.join(NAMES)}.")] = PAIR,
    num_prompts: Annotated[int, typer.Option(help="Prompts of a run.")] = PROMPTS,
    repeats: Annotated[int, typer.Option(help="Runs of each mode, alternating.")] = REPEATS,
) -> None:
    """Three small models answer through stock SGLang, then DFLASH runs beside plain decoding: about five minutes."""
    console = wide_console()
    with user_errors(), tempfile.TemporaryDirectory(prefix="sglang-dflash-demo-") as folder:
        asyncio.run(demo(console, comparison(pair, Path(folder), num_prompts, repeats)))


if __name__ == "__main__":
    typer.run(main)
