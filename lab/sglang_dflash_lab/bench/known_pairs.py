"""The pairs that a benchmark knows by name: the tiny ones, and those with a model card."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_dflash.drafter.published import published_pairs
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.pairs import NAMES, drafter_path, target_path

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
