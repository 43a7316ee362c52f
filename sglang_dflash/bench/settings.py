"""What one benchmark is told to do, and the pairs that it knows by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dflash.bench import tasks
from sglang_dflash.bench.client import Sampling
from sglang_dflash.bench.modes import Mode
from sglang_dflash.bench.server import Launch
from sglang_dflash.bench.tasks.question import Question
from sglang_dflash.errors import DFlashError
from sglang_dflash.pairs import NAMES, drafter_path, target_path

_PUBLISHED = Path(__file__).with_name("published.json")
# The tiny pairs are compared token for token, and float32 is where equality holds (see docs/benchmarking.md).
_TINY_ARGS = ("--dtype", "float32")


@dataclass(frozen=True)
class Pair:
    """A target with its drafter and what a benchmark of it needs by default.

    Attributes:
        name: ``tiny-hybrid``, ``Qwen3.5-4B``, …; None for a pair given by its paths.
        thinking: whether the chat template's thinking switch is on; None leaves it to the template.
        max_tokens: longest answer.
        server_args: arguments every arm's server gets.
    """

    target: str
    drafter: str | None
    name: str | None = None
    thinking: bool | None = None
    max_tokens: int = 4096
    server_args: tuple[str, ...] = ()

    @property
    def tiny(self) -> bool:
        return self.name in NAMES


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
        """How the server of an arm is started."""
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
        """What is asked of a task."""
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


@cache
def published_pairs() -> dict[str, dict[str, Any]]:
    """What the model cards publish, by target: names, figures, and the setup they were measured with."""
    pairs: dict[str, dict[str, Any]] = json.loads(_PUBLISHED.read_text())
    return pairs


def find_pair(name: str | None, target: str | None, drafter: str | None, drafter_kind: str = "good") -> Pair:
    """The pair called ``name``, or the one given by its paths; ``target`` and ``drafter`` replace parts of a named one.

    Raises:
        DFlashError: no such pair, or neither a name nor a target.
    """
    if name in NAMES:
        found = Pair(str(target_path(name)), str(drafter_path(name, drafter_kind)), name, False, 512, _TINY_ARGS)
    elif name in published_pairs():
        card = published_pairs()[name]
        found = Pair(card["target"], card["drafter"], name, True)
    elif name is None and target is not None:
        return Pair(target, drafter)
    else:
        known = ", ".join((*NAMES, *published_pairs()))
        raise DFlashError(f"pair {name!r}", expected=f"one of {known}", remedy="give --pair NAME, or --target PATH")
    return replace(found, target=target or found.target, drafter=drafter or found.drafter)
