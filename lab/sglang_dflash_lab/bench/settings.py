"""Settings of one benchmark, from the options of the command line."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.diagnose.client import Sampling
from sglang_dflash.drafter.published import published_pairs
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import tasks
from sglang_dflash_lab.bench.known_pairs import Pair, find_pair
from sglang_dflash_lab.bench.modes import Mode, parse_modes
from sglang_dflash_lab.bench.options import Options
from sglang_dflash_lab.bench.server import Launch
from sglang_dflash_lab.bench.tasks import check_name, offline
from sglang_dflash_lab.bench.tasks.question import Question


@dataclass(frozen=True)
class Settings:
    """One invocation of ``sglang-dflash bench``.

    Attributes:
        concurrencies: numbers of requests in flight.
        num_prompts: questions per run.
        together: all servers up at once, arms taken in turn within a cell; else one server after the other.
        server_args: arguments that every server gets besides the pair's own.
        base_urls: running servers by mode label; empty starts them.
        builtin_path: folder put on the ``PYTHONPATH`` of ``builtin`` arms, None for none.
        seed: of the choice of questions and of sampling.
    """

    pair: Pair
    modes: tuple[Mode, ...]
    tasks: tuple[str, ...]
    concurrencies: tuple[int, ...]
    num_prompts: int
    repeats: int
    out: Path
    sampling: Sampling
    seed: int = 0
    together: bool = True
    server_args: tuple[str, ...] = ()
    base_urls: dict[str, str] = field(default_factory=dict)
    builtin_path: Path | None = None
    data_dir: Path | None = None

    def launch(self, mode: Mode) -> Launch:
        """The launch of an arm's server."""
        args = (
            *("--model-path", self.pair.target), *mode.server_args(self.pair.target, self.pair.drafter),
            *self.pair.server_args, "--max-running-requests", str(max(self.concurrencies)),
            # An idle server polls its queue otherwise and takes a core from the arm that is being measured.
            *(("--sleep-on-idle",) if self.together else ()), *self.server_args,
        )  # fmt: skip
        env = mode.server_env()
        if mode.kind == "builtin" and self.builtin_path is not None:
            env["PYTHONPATH"] = str(self.builtin_path)
        return Launch(args, tuple(env.items()))

    def questions(self, task: str) -> list[Question]:
        """The questions of a task."""
        return tasks.load(task, self.num_prompts, seed=self.seed, data_dir=self.data_dir)

    def describe(self) -> dict[str, Any]:
        """The settings as JSON, for the provenance line."""
        return {
            "pair": self.pair.name,
            "target": self.pair.target,
            "drafter": self.pair.drafter,
            "modes": [mode.label for mode in self.modes],
            "tasks": list(self.tasks),
            "concurrencies": list(self.concurrencies),
            "num_prompts": self.num_prompts,
            "repeats": self.repeats,
            "sampling": vars(self.sampling),
            "seed": self.seed,
            "together": self.together,
        }


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
        names = offline.TASKS
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
