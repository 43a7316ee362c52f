"""From the command line's options to `Settings`."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

from sglang_dflash.bench import tasks as all_tasks
from sglang_dflash.bench.client import Sampling
from sglang_dflash.bench.modes import Mode, parse_modes
from sglang_dflash.bench.settings import Pair, Settings, find_pair, published_pairs
from sglang_dflash.bench.tasks import pair_tasks
from sglang_dflash.errors import DFlashError

_URL = re.compile(r"(?:(?P<mode>.+)=)?(?P<url>https?://.+)")


def configure(
    *,
    pair: str | None,
    target: str | None,
    draft: str | None,
    drafter: str,
    modes: str,
    tasks: str | None,
    concurrency: str,
    num_prompts: int,
    max_tokens: int | None,
    base_url: list[str] | None,
    server_args: str,
    out: Path,
    repeats: int = 1,
    temperature: float = 0.0,
    thinking: bool | None = None,
    seed: int = 0,
    one_at_a_time: bool | None = None,
    builtin_shims: Path | None = None,
    data_dir: Path | None = None,
) -> Settings:
    """The options as `Settings`.

    Raises:
        DFlashError: an option that cannot be read, named with what was expected.
    """
    arms = tuple(parse_modes(modes))
    urls = base_urls(base_url or [], arms)
    if urls and pair is None and target is None:
        chosen = Pair(target=next(iter(urls.values())), drafter=None)  # the server knows its models
    else:
        chosen = find_pair(pair, target, draft, drafter)
    return Settings(
        pair=chosen,
        modes=arms,
        tasks=_tasks(tasks, chosen),
        concurrencies=_numbers(concurrency),
        num_prompts=num_prompts,
        repeats=repeats,
        out=out,
        sampling=replace(
            Sampling(max_tokens or chosen.max_tokens, temperature, seed),
            thinking=chosen.thinking if thinking is None else thinking,
        ),
        seed=seed,
        together=chosen.tiny if one_at_a_time is None else not one_at_a_time,
        server_args=tuple(shlex.split(server_args)),
        base_urls=urls,
        builtin_path=builtin_shims,
        data_dir=data_dir,
    )


def base_urls(texts: list[str], modes: tuple[Mode, ...]) -> dict[str, str]:
    """`--base-url` options as URL by mode label; empty for none.

    Raises:
        DFlashError: not a URL, or not one for every mode.
    """
    urls: dict[str, str] = {}
    for text in texts:
        match = _URL.fullmatch(text)
        if match is None:
            raise DFlashError(f"--base-url {text!r}", expected="URL or MODE=URL", remedy="begin it with http://")
        urls[match["mode"] or modes[0].label] = match["url"]
    labels = {mode.label for mode in modes}
    if urls and urls.keys() != labels:
        raise DFlashError(
            f"--base-url for {', '.join(sorted(urls))} and --modes {', '.join(sorted(labels))}",
            expected="a running server for every mode",
            remedy="give --base-url MODE=URL once per mode",
        )
    return urls


def _tasks(text: str | None, pair: Pair) -> tuple[str, ...]:
    if text is not None:
        names = tuple(text.split(","))
    elif pair.name in published_pairs():
        names = tuple(dict.fromkeys(row["task"] for row in published_pairs()[pair.name]["accept"])) or ("gsm8k",)
    else:
        names = pair_tasks.TASKS
    for name in names:
        if name not in all_tasks.TASKS:
            known = ", ".join(all_tasks.TASKS)
            raise DFlashError(f"task {name!r}", expected=f"one of {known}", remedy="correct --tasks")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise DFlashError(
            f"--concurrency {text!r}", expected="positive numbers separated by commas", remedy="for example 1,8"
        )
    return numbers
