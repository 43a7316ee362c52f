"""A benchmark's pair, and its arms: the ways to serve it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dflash.check.diagnose.client import WORKER_KEY
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.published import published_pairs
from sglang_dflash_lab.pairs import NAMES, drafter_path, target_path

AR = "ar"
OURS = ("dflash", "adaptive", "copies", "best")
_BEST = Path(__file__).parents[1] / "measure" / "best_drafts"  # a plugin of the servers
KINDS = (*OURS, "builtin")  # beside ``ar``
_ARM = re.compile(rf"(?:(?P<ar>ar)|(?P<kind>{'|'.join(KINDS)}):(?P<size>\d+))(?P<env>(?:\+\w+=[^+]*)*)")
FORMS = f"{AR}, {', '.join(f'{kind}:BLOCK' for kind in KINDS)}, and optional +NAME=VALUE"


@dataclass(frozen=True)
class Pair:
    """A target with its drafter, and a benchmark's defaults for it.

    Attributes:
        name: ``tiny-hybrid``, ``Qwen3.5-4B``, …; None for a pair given by its paths.
        thinking: the chat template's thinking switch; None uses the template's default.
        max_tokens: maximum tokens per answer.
    """

    target: str
    drafter: str | None
    name: str | None = None
    thinking: bool | None = None
    max_tokens: int = 4096
    server_args: tuple[str, ...] = ()


def find_pair(name: str | None, target: str | None, drafter: str | None, kind: str = "good") -> Pair:
    """Return the named pair, or the one at the paths; a path replaces that part of a named pair.

    Raises:
        DFlashError: unknown pair, or no target.
    """
    if name in NAMES:
        # Answers are equal in float32 only.
        dtype = ("--dtype", "float32")
        found = Pair(str(target_path(name)), str(drafter_path(name, kind)), name, False, 512, dtype)
    elif name in published_pairs():
        card = published_pairs()[name]
        found = Pair(card["target"], card["drafter"], name, True)
    elif name is None and target is not None:
        return Pair(target, drafter)
    else:
        known = ", ".join((*NAMES, *published_pairs()))
        raise DFlashError(f"pair {name!r} is unknown", remedy=f"use one of {known}, or --target")
    return replace(found, target=target or found.target, drafter=drafter or found.drafter)


@dataclass(frozen=True)
class Arm:
    """One way to serve the pair.

    Attributes:
        kind: ``ar`` (no speculation), ``dflash`` (our worker, fixed block), ``adaptive`` (our worker, adaptive width),
            ``copies`` (our worker, no drafter), ``best`` (``dflash`` without the target's noise in drafts),
            or ``builtin`` (SGLang's DFLASH worker).
        size: block size; 0 for ``ar``.
    """

    label: str
    kind: str
    size: int = 0
    env: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read ``dflash:16`` or ``dflash:16+NAME=VALUE``; raise a DFlashError for anything else."""
        match = _ARM.fullmatch(text.strip())
        if match is None:
            raise DFlashError(f"mode {text!r} is invalid", remedy=f"use {FORMS}")
        pairs = [pair.partition("=") for pair in match["env"].split("+") if pair]
        kind = match["ar"] or match["kind"]
        path = os.pathsep.join(filter(None, (str(_BEST), os.environ.get("PYTHONPATH"))))
        own = {"builtin": [("SGLANG_DFLASH", "builtin")], "best": [("PYTHONPATH", path)]}.get(kind, [])
        env = (*own, *((name, value) for name, _, value in pairs))
        return cls(text.strip(), kind, int(match["size"] or 0), env)

    def server_args(self, pair: Pair) -> list[str]:
        """Return the arguments to add to ``--model-path TARGET``; raise a DFlashError if a drafter is missing."""
        if self.kind == AR:
            return []
        if self.kind == "copies":
            return ["--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", str(self.size)]
        if pair.drafter is None:
            raise DFlashError(f"mode {self.label} needs a drafter", remedy="add one")
        adaptive = ["--speculative-adaptive"] if self.kind == "adaptive" else []
        drafter = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", pair.drafter]
        return [*drafter, "--speculative-num-draft-tokens", str(self.size), *adaptive]


def parse_arms(text: str) -> list[Arm]:
    """Read the list of ``--modes``; raise a DFlashError for an unknown or duplicate arm."""
    arms = [Arm.parse(part) for part in text.split(",")]
    if len({arm.label for arm in arms}) < len(arms):
        raise DFlashError(f"--modes {text} names an arm twice", remedy="remove one")
    return arms


def check_arm(arm: Arm, info: dict[str, Any]) -> None:
    """Raise a DFlashError if a server's configuration differs from its arm's.

    SGLang only logs a plugin that fails to load, so a ``dflash`` run could measure SGLang's worker.

    Args:
        info: the server's ``/server_info``.
    """
    algorithm, block = info.get("speculative_algorithm"), info.get("speculative_num_draft_tokens")
    ours = WORKER_KEY in info["internal_states"][0]
    checks = [(f"speculative_algorithm {algorithm}", (algorithm is None) == (arm.kind == AR))]
    if arm.kind in KINDS:
        checks.append((f"{'our' if ours else 'not our'} worker", ours == (arm.kind in OURS)))
        checks.append((f"block size {block}", block == arm.size))
    for found, right in checks:
        if not right:
            raise DFlashError(
                f"the server of arm {arm.label} reports {found} in /server_info, which differs from the arm",
                remedy="read the beginning of its log for a plugin that failed to load, or correct --modes",
            )
