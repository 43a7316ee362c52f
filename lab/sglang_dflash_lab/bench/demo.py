"""``make demo``: answers of three small models on stock SGLang, then DFLASH compared with plain decoding."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from openai import OpenAI
from rich.console import Console
from rich.markup import escape

from sglang_dflash.check import user_errors
from sglang_dflash_lab.bench import session, tasks
from sglang_dflash_lab.bench.arms import AR, find_pair, parse_arms
from sglang_dflash_lab.bench.figures import Summary, print_results
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import running
from sglang_dflash_lab.bench.session import Servers, Settings
from sglang_dflash_lab.pairs import NAMES
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.tables import wide_console

DFLASH, BEST = "dflash:16", "best:16"
FORKS, TEMPERATURE = "tiny-forks", 0.7


def demo(console: Console, settings: Settings) -> None:
    for name in NAMES:
        if name != settings.pair.name:
            launch = replace(settings, pair=find_pair(name, None, None)).launch(settings.arms[0])
            console.print(f"\n[bold]$[/bold] {escape(launch.describe())}")
            with running(launch, settings.out / "logs" / f"{name}.log") as url:
                question = prompts("chat", "heldout", 1, shape="single")[0].messages
                _print_turn(console, question[-1]["content"], ask(url, question))
    with Servers(settings, lambda line: console.print(f"\n{escape(line)}")) as servers:
        urls = {label: servers.url(label) for label in (AR, DFLASH)}
        for task in TASKS:
            show_answer(console, task, urls[AR], urls[DFLASH])
        runs = f"{settings.repeats} alternating runs of {settings.num_prompts} single questions"
        console.print(f"\n{runs}, {describe_hardware(hardware())}")
        session.run(replace(settings, base_urls=urls), console.print)
    print_results(settings.out, console)
    console.print(f"\n{escape(sampled(console, settings))}", style="bold", highlight=False)


def sampled(console: Console, settings: Settings) -> str:
    """Return how many tokens a step of sampled requests commits, with and without the target's noise in drafts."""
    out, pair, arms = settings.out / "sampled", find_pair(FORKS, None, None), parse_arms(f"{DFLASH},{BEST}")
    settings = replace(settings, pair=pair, arms=arms, out=out, temperature=TEMPERATURE, concurrencies=[1])
    session.run(settings, console.print)
    accept = {row.mode: row.accept for row in Summary(out).rows.values()}
    figures = (
        f"{accept[DFLASH]:.2f} tokens per step with the target's noise in unsure drafts, {accept[BEST]:.2f} without"
    )
    return f"{FORKS} at temperature {TEMPERATURE}: {figures}"


def show_answer(console: Console, task: str, plain: str, dflash: str) -> None:
    prompt = prompts(task, "heldout", 1, shape="single")[0]
    answer, reference = ask(dflash, prompt.messages), ask(plain, prompt.messages)
    _print_turn(console, prompt.messages[-1]["content"], answer)
    same = "the same without speculation" if answer == reference else f"[red]without speculation: {escape(reference)}"
    console.print(f"[dim]{task}: {'right' if prompt.check(answer) else 'wrong'}; {same}[/dim]")


def ask(url: str, messages: Sequence[dict[str, str]]) -> str:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model="default",
            messages=list(messages),  # type: ignore[arg-type]
            temperature=0,
            max_tokens=256,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    return reply.choices[0].message.content or ""


def _print_turn(console: Console, question: str, answer: str) -> None:
    console.print(f"\n[bold]user[/bold]  {escape(question)}")
    console.print(f"[bold]model[/bold] {escape(answer)}")


def main(
    pair: Annotated[str, typer.Option(help=f"The pair to compare on: {', '.join(NAMES)}.")] = "tiny-hybrid",
    num_prompts: Annotated[int, typer.Option(help="Prompts per run.")] = 32,
    repeats: Annotated[int, typer.Option(help="Runs per arm; arms alternate.")] = 5,
) -> None:
    """Show answers of three small models on stock SGLang, then compare DFLASH with plain decoding."""
    with user_errors():
        folder = tempfile.mkdtemp(prefix="sglang-dflash-demo-")  # kept; the last line prints it
        settings = Settings(
            *(find_pair(pair, None, None), parse_arms(f"{AR},{DFLASH}"), [tasks.QUESTIONS], [1, 8]),
            *(num_prompts, repeats, Path(folder)),
            thinking=False,
        )
        demo(wide_console(), settings)


if __name__ == "__main__":
    typer.run(main)
