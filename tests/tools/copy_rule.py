"""Compare rules for taking a copy in place of a draft: ``python -m tests.tools.copy_rule``.

Accept lengths are counts, so they do not depend on the machine. The prompts are those for choosing thresholds.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import typer

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.plan.settings import COPIES_SWITCH as SWITCH
from sglang_dflash_lab.bench.tasks import TUNING, load
from sglang_dflash_lab.pairs import drafter_path
from sglang_dflash_lab.tables import Table
from tests.support.generation import flush, generate_all
from tests.support.pair_servers import dflash_server, with_plugin
from tests.support.prompts import message_ids

PAIR, TASKS, USERS, NEW_TOKENS = "tiny-hybrid", ("edit-json", "edit-code", "edit-chat", "repeat"), 8, 96
NEVER = "never"
# Rule -> shortest match, threshold, whether the threshold is a probability instead of a margin.
RULES: dict[str, tuple[int, float, bool]] = {
    NEVER: (4, 0.0, False),
    **{f"margin < {margin}": (4, margin, False) for margin in (1, 2, 4, 8)},
    "always": (4, 1e9, False),
    **{f"probability < {p}": (4, p, True) for p in (0.5, 0.7, 0.9)},
    **{f"margin < 4 after {least}": (least, 4, False) for least in (6, 8)},
}


def accept_lengths(drafter: str, rule: str, prompts: dict[str, list[list[int]]]) -> list[float]:
    """Return accepted drafts and bonus tokens per step, by task."""
    least, unsure, probability = RULES[rule]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "copy_rule.json").write_text(
            json.dumps({"least": least, "unsure": unsure, "probability": probability})
        )
        plugin = with_plugin(folder, "copy_rule")
        with dflash_server(PAIR, folder, drafter=drafter, **{SWITCH: str(int(rule != NEVER))}, **plugin) as server:
            found = []
            for asked in prompts.values():
                flush(server)
                answers = generate_all(server, asked, USERS, NEW_TOKENS)
                # A prefill gives the first token.
                tokens = sum(len(answer.tokens) - 1 for answer in answers)
                found.append(tokens / sum(answer.meta["spec_verify_ct"] for answer in answers))
            return found


def main(drafter: str = "noisy", number: int = 16, rules: str = ",".join(RULES)) -> None:
    """Print the accept length of each rule on ``number`` prompts per task."""
    chosen = rules.split(",")
    if DrafterConfig.load(drafter_path(PAIR, drafter)).selector_rank and any(RULES[rule][2] for rule in chosen):
        possible = ",".join(rule for rule, (_, _, probability) in RULES.items() if not probability)
        raise typer.BadParameter(
            f'the drafter "{drafter}" has a candidate selector, whose scores are margins and no probabilities. '
            f'Fix: --rules "{possible}"'
        )
    tasks = {task: task + TUNING for task in TASKS} | {"questions": "questions"}
    prompts = {task: message_ids(PAIR, load(name, number)) for task, name in tasks.items()}
    rows = [[rule, *(f"{length:.2f}" for length in accept_lengths(drafter, rule, prompts))] for rule in chosen]
    typer.echo(Table(drafter, "", ["a copy is taken", *prompts], rows).markdown())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
