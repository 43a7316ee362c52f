"""``sglang-dflash check``: from the words of a command line to a report."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from operator import itemgetter

from sglang_dflash.check.flags import check_unread, merged, parse
from sglang_dflash.check.machine import asked_about
from sglang_dflash.check.report import Report, preflight
from sglang_dflash.errors import DFlashError, Finding, note
from sglang_dflash.launch.device import Device, why_no_accelerator
from sglang_dflash.launch.old_flags import explain_environment, modernise_argv
from sglang_dflash.launch.published import card_of_drafter, parsers_of
from sglang_dflash.launch.settings import flag_of
from sglang_dflash.upstream import installed_plugins

_STARTS = ("sglang.launch_server", "serve")  # `python -m sglang.launch_server`, `sglang serve`
_BLOCK = "speculative_num_draft_tokens"


def examine(words: Sequence[str], memory_gib: float | None, gpu: str | None, users: int | None) -> tuple[Report, str]:
    """Return the report of a command, and its title: the models and the device."""
    target, drafter, flags = split(words)
    models = [target or "", drafter or ""]
    try:
        modern, notes = modernise_argv(merged(flags))
        settings, given = parse(modern, target=target, drafter=drafter)
        models = [settings.model_path, settings.speculative_draft_model_path or ""]
        device = asked_about(settings.device, memory_gib, gpu, base_gpu_id=settings.base_gpu_id)
    except DFlashError as raised:
        return Report([Finding.of(raised, "command line")]), " + ".join(filter(None, models))
    read = [note(each, about="old flag") for each in notes]
    read += [note(each, about="variable") for each in explain_environment()]
    if gpu is None and memory_gib is None and settings.device != "cpu" and (problem := _problem_here(device)):
        read.append(Finding.of(problem, "this machine (--gpu checks another)"))
    command = _start_command(target, drafter, flags)
    if users:
        block, found = _fastest_block(models[1], users)
        read.append(found)
        if block and not settings.block:
            settings = settings.changed(**{_BLOCK: block})
            command += f" {flag_of(_BLOCK)} {block}"
    for name, parser in parsers_of(models[0]).items():
        if not getattr(settings, name):
            command += f" {flag_of(name)} {parser}"
    report = preflight(settings, device)
    if report.memory:  # otherwise not all flags have been read
        read += check_unread(given, settings)
    return replace(report, findings=[*read, *report.findings], command=command), " + ".join(filter(None, models)) + (
        f" on {device.name}"
    )


def split(words: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """Return target, drafter and flags of the words after ``check``, which may be a launch command."""
    start = next((words.index(each) + 1 for each in _STARTS if each in words[:3]), 0)
    rest = list(words[start:])
    models = [*takewhile(lambda word: not word.startswith("-"), rest[:2])]
    target, drafter, *_ = [*models, None, None]
    return target, drafter, rest[len(models) :]


def _fastest_block(drafter: str, users: int) -> tuple[int | None, Finding]:
    """Return the block that was fastest in most tasks of the drafter's card, or None, and a note about the card."""
    card = (card_of_drafter(drafter) if drafter else None) or {"drafter": drafter or "no drafter", "speed": []}
    rows = [row for row in card["speed"] if row["arm"] == "dflash"]
    here = sorted((row for row in rows if row["concurrency"] == users), key=itemgetter("tokens_per_s"))
    fastest, about = {row["task"]: row["block"] for row in here}, "block size by users"
    if not fastest:
        known = ", ".join(map(str, sorted({row["concurrency"] for row in rows})))
        figures = f"has figures for {known} users, not for {users}" if known else "has no figures that are known here"
        return None, note(f"the card of {card['drafter']} {figures}", about=about)
    won = Counter(fastest.values()).most_common()
    named = ", ".join(f"block {block} in {n} of {len(fastest)} tasks" for block, n in won)
    return won[0][0], note(f"fastest with {users} users on {card['drafter']}'s card: {named}", about=about)


def _start_command(target: str | None, drafter: str | None, flags: Sequence[str]) -> str:
    pair = {"--model-path": target, "--speculative-algorithm": "DFLASH", "--speculative-draft-model-path": drafter}
    given = [word.partition("=")[0] for word in flags if word.startswith("--")]  # SGLang accepts abbreviated flags
    own = [word for flag, value in pair.items() if value and not any(map(flag.startswith, given))
           for word in (flag, value)]  # fmt: skip
    return shlex.join(["python", "-m", "sglang.launch_server", *own, *flags])


def _problem_here(device: Device) -> DFlashError | None:
    if device.is_local:  # torch would hang if the driver does not respond
        return why_no_accelerator(device.name) if device.memory else None
    cpu_platform = any(plugin.name == "dflash_cpu" for plugin in installed_plugins())
    return None if cpu_platform else why_no_accelerator(None)
