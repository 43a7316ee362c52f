"""From the command line's options to :class:`Settings`."""

from __future__ import annotations

import re
import shlex

from sglang_dflash.bench.client import Sampling
from sglang_dflash.bench.modes import Mode, parse_modes
from sglang_dflash.bench.options import Options
from sglang_dflash.bench.settings import Pair, Settings, find_pair, published_pairs
from sglang_dflash.bench.tasks import check_name, pair_tasks
from sglang_dflash.errors import DFlashError

_URL = re.compile(r"(?:(?P<mode>.+)=)?(?P<url>https?://.+)")


def configure(options: Options) -> Settings:
    """The options as :class:`Settings`.

    Raises:
        DFlashError: an option that cannot be read, named with what was expected.
    """
    arms = tuple(parse_modes(options.modes))
    urls = base_urls(options.base_url or [], arms)
    if urls and options.pair is None and options.target is None:
        pair = Pair(target=next(iter(urls.values())), drafter=None)  # the server knows its models
    else:
        pair = find_pair(options.pair, options.target, options.draft, options.drafter)
    return Settings(
        pair=pair,
        modes=arms,
        tasks=_tasks(options.tasks, pair),
        concurrencies=_numbers(options.concurrency),
        num_prompts=options.num_prompts,
        repeats=options.repeats,
        out=options.out,
        sampling=Sampling(
            options.max_tokens or pair.max_tokens,
            options.temperature,
            options.seed,
            thinking=pair.thinking if options.thinking is None else options.thinking,
        ),
        seed=options.seed,
        together=pair.tiny if options.one_at_a_time is None else not options.one_at_a_time,
        server_args=tuple(shlex.split(options.server_args)),
        base_urls=urls,
        builtin_path=options.builtin_shims,
        data_dir=options.data_dir,
    )


def base_urls(texts: list[str], modes: tuple[Mode, ...]) -> dict[str, str]:
    """``--base-url`` options as URL by mode label; empty for none.

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
        check_name(name)
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
