"""A whole benchmark: every run that the results file lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import load, provenance, results, tasks
from sglang_dflash_lab.bench.arms import Arm, Pair, check_arm
from sglang_dflash_lab.bench.load import Cell
from sglang_dflash_lab.bench.server import Launch, running

# One results file has one value of each.
_FIXED = ("target", "drafter", "num_prompts", "max_tokens", "temperature", "thinking", "seed")


@dataclass(frozen=True)
class Settings:
    """One invocation of ``sglang-dflash bench``.

    Attributes:
        num_prompts: prompts per run.
        thinking: the chat template's switch; None uses the template's default.
        together: run all servers at once and alternate arms within a cell; otherwise one server at a time.
        base_urls: running servers by arm; empty starts them.
    """

    pair: Pair
    arms: Sequence[Arm]
    tasks: Sequence[str]
    concurrencies: Sequence[int]
    num_prompts: int
    repeats: int
    out: Path
    max_tokens: int = 512
    temperature: float = 0.0
    thinking: bool | None = None
    seed: int = 0
    together: bool = True
    server_args: tuple[str, ...] = ()
    base_urls: Mapping[str, str] = field(default_factory=dict)

    def launch(self, arm: Arm) -> Launch:
        # An idle server would poll its queue and take a core.
        idle = ("--sleep-on-idle",) if self.together else ()
        most = ("--max-running-requests", str(max(self.concurrencies)))
        fixed = ("--model-path", self.pair.target, *arm.server_args(self.pair), *self.pair.server_args, *most, *idle)
        return Launch((*fixed, *self.server_args), arm.env)

    def describe(self) -> dict[str, Any]:
        pair = {"pair": self.pair.name, "target": self.pair.target, "drafter": self.pair.drafter}
        names = ("tasks", "concurrencies", "repeats", "together", *_FIXED[2:])
        values = {name: getattr(self, name) for name in names}
        return {**pair, "modes": [arm.label for arm in self.arms], **values}


def plan(settings: Settings) -> Iterator[Cell]:
    """Yield the cells in order of measurement; every second repeat reverses the arms, so a linear drift cancels."""
    labels = [arm.label for arm in settings.arms]
    for repeat in range(settings.repeats):
        order = labels[::-1] if repeat % 2 else labels
        if settings.together or settings.base_urls:
            for concurrency, task, mode in product(settings.concurrencies, settings.tasks, order):
                yield Cell(mode, task, concurrency, repeat)
        else:
            for mode, concurrency, task in product(order, settings.concurrencies, settings.tasks):
                yield Cell(mode, task, concurrency, repeat)


def run(settings: Settings, say: Callable[[str], None]) -> None:
    """Measure the missing cells, and append each run to ``settings.out/results.jsonl``; the same settings resume.

    Raises:
        DFlashError: the folder has other settings, a server differs from its arm, or a run failed.
    """
    _refuse_other_settings(settings)
    done = {Cell(**{name: row[name] for name in Cell.__annotations__}) for row in results.read(settings.out, "run")}
    missing = [cell for cell in plan(settings) if cell not in done]
    if not missing:
        return
    results.append(settings.out, "provenance", provenance.collect(settings.describe()))
    with Servers(settings, say) as servers:
        for cell in missing:
            measured = servers.measure(cell)
            results.append(settings.out, "run", measured)
            say(
                f"{cell.mode}, {cell.task}, users at once: {cell.concurrency}, run {cell.repeat + 1}: "
                f"{measured['output_throughput']:.1f} tokens/s, {measured['duration']:.1f} s"
            )


class Servers(contextlib.ExitStack):
    """The arms' servers, started on first use and stopped on exit."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        super().__init__()
        self._settings, self._say = settings, say
        self._arms = {arm.label: arm for arm in settings.arms}
        self._urls: dict[str, str] = {}
        self._prompts: dict[str, Path] = {}

    def url(self, label: str) -> str:
        """Return the base URL of an arm; with one server at a time, stop the other first."""
        if label not in self._urls:
            settings, arm = self._settings, self._arms[label]
            if not (settings.together or settings.base_urls):
                self._urls.clear()
                self.close()
            url = command = settings.base_urls.get(label)
            if url is None:
                launch = settings.launch(arm)
                command = launch.describe()
                self._say(f"starting {label}: {command}")
                name = "".join(each if each.isalnum() else "_" for each in label)
                url = self.enter_context(running(launch, settings.out / "logs" / f"{name}.log"))
            info = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).raise_for_status().json()
            check_arm(arm, info)
            results.append(settings.out, "server", {"mode": label, "command": command, "version": info["version"]})
            self._urls[label] = url
        return self._urls[label]

    def measure(self, cell: Cell) -> dict[str, Any]:
        url, settings = self.url(cell.mode), self._settings
        # A benchmark of running servers may have no pair.
        tokenizer = settings.pair.target or httpx.get(f"{url}/model_info", trust_env=False).json()["tokenizer_path"]
        if cell.task not in self._prompts:
            self._prompts[cell.task] = settings.out / f"prompts-{Path(cell.task).stem}.jsonl"
            asked = tasks.load(cell.task, settings.num_prompts, settings.seed)
            load.write_prompts(self._prompts[cell.task], asked, tokenizer, settings.thinking)
        log = settings.out / "load.log"
        prompts = self._prompts[cell.task]
        return load.measure(url, cell, prompts, tokenizer, settings.max_tokens, settings.temperature, log)


def _refuse_other_settings(settings: Settings) -> None:
    new = settings.describe()
    for old in [row["settings"] for row in results.read(settings.out, "provenance")[-1:]]:
        for name in _FIXED:
            if old[name] != new[name]:
                raise DFlashError(
                    f"{settings.out} was measured with {name} {old[name]}, not {new[name]}", remedy="give another --out"
                )
