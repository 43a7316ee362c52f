"""The command line ``sglang-dflash``, with the commands of other installed distributions."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from operator import itemgetter
from shlex import join
from typing import Annotated

import typer

from sglang_dflash import __version__
from sglang_dflash.check import user_errors
from sglang_dflash.check.diagnose.client import Client
from sglang_dflash.check.diagnose.verdict import Diagnosis
from sglang_dflash.check.diagnose.verdict import diagnose as examine_server
from sglang_dflash.check.doctor import doctor
from sglang_dflash.check.flags import check_unread, pair_arguments, parse
from sglang_dflash.check.machine import GPUS, asked_about
from sglang_dflash.check.report import Report, preflight
from sglang_dflash.errors import DFlashError, Finding, note
from sglang_dflash.launch.device import Device, why_no_accelerator
from sglang_dflash.launch.old_flags import modernise_argv
from sglang_dflash.launch.published import card_of_drafter
from sglang_dflash.launch.settings import flag_of
from sglang_dflash.upstream import installed_plugins

SUMMARIES = {
    "check": "Check a pair, its memory and server flags before a start.",
    "doctor": "Check which worker serves DFLASH here, and with which versions.",
    "diagnose": "Measure how much drafting helps on a running server.",
    "bench": "Measure plain decoding and DFLASH on real servers.",
    "report": "Write a page of tables and plots from a benchmark's results.",
    "pairs": "List and find the tiny trained pairs, or print prompts.",
    "version": "Print the versions of this package and of SGLang.",
}
LAB = ("bench", "report", "pairs")  # of sglang-dflash-lab
OTHER_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
ANY_ARGUMENTS = {**OTHER_ARGUMENTS, "help_option_names": []}


app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def print_version(asked: bool) -> None:
    from sglang_dflash.upstream import TESTED_SGLANG, installed_version

    if asked:
        typer.echo(f"sglang-dflash {__version__} for SGLang {TESTED_SGLANG}; installed: {installed_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=print_version, help=SUMMARIES["version"])] = False,
) -> None:
    """Check, serve and measure DFLASH speculative decoding with stock SGLang.

    Example: sglang-dflash check Qwen/Qwen3.5-4B z-lab/Qwen3.5-4B-DFlash
    """


@app.command(short_help=SUMMARIES["check"], context_settings=OTHER_ARGUMENTS)
def check(
    flags: typer.Context,
    target: Annotated[str, typer.Argument(help="Target: directory or hub id.")],
    drafter: Annotated[
        str | None, typer.Argument(help="Drafter: directory, hub id, or auto (the published one). It may be left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="List all checks and the memory table.")] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Check against this much memory: of --gpu, a Hopper GPU, or a CPU with --device cpu."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help=f"Check this GPU instead of the local one: {', '.join(GPUS)}, or its end (4090)."),
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests: name the block that the drafter's card had fastest.")
    ] = None,
) -> None:
    """Check a pair and server flags before starting a server: compatibility, memory and flags.

    Put the server's flags after the models. Only configurations and safetensors headers are read. The first line is
    the verdict. Exit status: 0 no problem, 1 warnings, 2 errors.

    Example: sglang-dflash check Qwen/Qwen3.5-4B z-lab/Qwen3.5-4B-DFlash
    """
    if drafter is not None and drafter.startswith("-"):  # a flag of the server
        flags.args.insert(0, drafter)
        drafter = None
    report, device, drafter = _report(target, drafter, flags.args, memory_gib, gpu)
    if users and drafter and report.plan is not None:
        report = replace(report, findings=[*report.findings, *_fastest_block(drafter, users)])
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        # no table: paths and flags stay whole
        models = " + ".join(filter(None, [target, drafter]))
        title = models if device is None else f"{models} on {device.name}"
        command = _start_command(target, drafter, flags.args)
        typer.echo("\n".join(report.lines(title, command, verbose=verbose)))
    raise typer.Exit(report.exit_code)


def _fastest_block(drafter: str, users: int) -> Iterator[Finding]:
    card = card_of_drafter(drafter)
    rows = [row for row in card["speed"] if (row["arm"], row["concurrency"]) == ("dflash", users)] if card else []
    fastest = {row["task"]: row["block"] for row in sorted(rows, key=itemgetter("tokens_per_s"))}
    if card and len({row["block"] for row in rows}) > 1:
        won = Counter(fastest.values()).most_common()
        named = ", ".join(f"block {block} in {n} of {len(fastest)} tasks" for block, n in won)
        yield note(f"fastest with {users} users on {card['drafter']}'s card: {named}", about="block size")


def _start_command(target: str, drafter: str | None, flags: list[str]) -> str:
    pair = {flag_of(name): value for name, value in pair_arguments(target, drafter).items()}
    given = [word.partition("=")[0] for word in flags if word.startswith("--")]  # SGLang accepts abbreviated flags
    own = [word for flag, value in pair.items() if not any(map(flag.startswith, given)) for word in (flag, value)]
    return join(["python", "-m", "sglang.launch_server", *own, *flags])


def _report(
    target: str, drafter: str | None, flags: list[str], memory_gib: float | None, gpu: str | None
) -> tuple[Report, Device | None, str | None]:
    """Return the report, the device that it is about, and the drafter that ``auto`` means."""
    try:
        modern, notes = modernise_argv(flags)
        settings, unread = parse(modern, target=target, drafter=drafter)
        device = asked_about(settings.device, memory_gib, gpu, base_gpu_id=settings.base_gpu_id)
    except DFlashError as raised:
        return Report([Finding.of(raised, "flags")]), None, drafter
    read = [note(each, about="old flag") for each in notes]
    if gpu is None and memory_gib is None and settings.device != "cpu" and (problem := _problem_here(device)):
        read.append(Finding.of(problem, "this machine (--gpu checks another)"))
    report = preflight(settings, device)
    findings = [*read, *check_unread(unread), *report.findings]
    return replace(report, findings=findings), device, drafter and settings.speculative_draft_model_path


def _problem_here(device: Device) -> DFlashError | None:
    if device.is_local:  # if the driver does not respond, torch would hang too
        return why_no_accelerator(device.name) if device.memory else None
    cpu_platform = any(plugin.name == "dflash_cpu" for plugin in installed_plugins())
    return None if cpu_platform else why_no_accelerator(None)


app.command(short_help=SUMMARIES["doctor"])(doctor)


async def _diagnose(url: str, key: str | None, tokens: int, context: int, seconds: float, as_json: bool) -> Diagnosis:
    async with Client(url, key) as client:
        return await examine_server(client, tokens, context, seconds, lambda line: typer.echo(line, err=as_json))


@app.command(short_help=SUMMARIES["diagnose"])
def diagnose(
    url: Annotated[str, typer.Argument(help="The server, for example http://127.0.0.1:30000.")],
    api_key: Annotated[str | None, typer.Option(help="API key of the server.")] = None,
    max_tokens: Annotated[int, typer.Option(min=16, help="Maximum tokens per answer.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Approximate length of the long prompts, in tokens.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1, help="Longest duration: a slow server answers less.")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Diagnose a running DFLASH server: how much does drafting help, and what limits it?

    Print the server's state, then send it up to 36 short prompts. An interruption, such as Ctrl-C, ends with a partial
    verdict. Exit status: 0 no problem, 1 a problem (the verdict says what to change), 2 no DFLASH server at this
    address.

    Example: sglang-dflash diagnose http://127.0.0.1:30000
    """
    with user_errors():
        report = asyncio.run(_diagnose(url, api_key, max_tokens, context, seconds, as_json))
        typer.echo(json.dumps(report.as_json(), indent=2) if as_json else str(report))
    raise typer.Exit(1 if report.verdict else 0)


@app.command(short_help=SUMMARIES["version"])
def version() -> None:
    """Print the package version, the SGLang version it targets and the one installed, as --version does.

    Example: sglang-dflash version
    """
    print_version(True)


def add_commands_of_other_distributions() -> None:
    found = {point.name: point for point in entry_points(group="sglang_dflash.commands")}
    for name, point in found.items():
        command, short_help = point.load(), SUMMARIES.get(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=short_help)
        else:
            app.command(name, short_help=short_help)(command)
    for name in LAB:
        if name not in found:
            text = f"{SUMMARIES[name]} Needs sglang-dflash-lab."
            app.command(name, help=text, context_settings=ANY_ARGUMENTS)(name_the_lab)


def name_the_lab(context: typer.Context) -> None:
    typer.echo(
        f"`sglang-dflash {context.info_name}` is part of sglang-dflash-lab, which is not installed. "
        f"Fix: run `pip install ./lab` in a checkout of sglang-dflash {__version__}.",
        err=True,
    )
    raise typer.Exit(2)


add_commands_of_other_distributions()

if __name__ == "__main__":
    app()
