"""Planted bugs, as negative controls: each must be noticed, and by the check that is there for its kind.

``python -m tests.rehearsal.mutants`` plants one after the other and prints who noticed it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

VARIABLE = "REHEARSE_MUTANT"


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        bug: what is wrong.
        plant: puts it into the package, in this process.
        noticed: words of the line that must report it.
        pair: the pair whose engine it is planted in.
        widths: whether every step has another width, in batches of two.
    """

    bug: str
    plant: Callable[[], None]
    noticed: str
    pair: str = "tiny-dense"
    widths: bool = False


def _before_forward(change: Callable[[Any, Any], Any]) -> None:
    """The drafter's forward gets ``change(model, input_ids)`` for its token ids."""
    from sglang_dflash.model.drafter import DFlashDraftModel

    forward = DFlashDraftModel.forward
    DFlashDraftModel.forward = lambda self, ids, *others: forward(self, change(self, ids), *others)


def _read_on_the_host() -> None:
    _before_forward(lambda model, ids: ids if int(ids[0]) >= 0 else ids[:0])


def _host_constant() -> None:
    _before_forward(lambda model, ids: torch.where(ids == torch.tensor(-1), 0, ids))


def _freed_memory() -> None:
    from tests.rehearsal.interpreter import pause

    def copy_from_outside(model: Any, ids: Any) -> Any:
        with pause():  # not from the graph's pool, and alive for as long as Python holds it
            return ids.clone()

    _before_forward(copy_from_outside)


def _stale_python_value() -> None:
    from sglang_dflash.model.attention import QKNormRope

    block, known = QKNormRope.block, {}
    QKNormRope.block = lambda self, positions: known.setdefault(positions.shape, block(self, positions.clone()))


def _short_rope_table() -> None:
    from sglang_dflash.model.attention import QKNormRope

    def rotate_by_few_rows(self: Any, heads: Any, weights: Any, positions: Any) -> Any:
        self.rotary.cos_sin_cache = self.rotary.cos_sin_cache[:32]
        return rotate(self, heads, weights, positions)

    rotate, QKNormRope.rotate = QKNormRope.rotate, rotate_by_few_rows


def _commit_one_too_early() -> None:
    from sglang_dflash.worker import commit

    original = commit.commit_mamba_states_after_verify

    def one_too_early(*args: Any, prepared_step_indices: Any, **kwargs: Any) -> None:
        last, tracked = prepared_step_indices
        original(*args, prepared_step_indices=((last - 1).clamp(min=0), tracked), **kwargs)

    commit.commit_mamba_states_after_verify = one_too_early


def _compiled_late() -> None:
    from sglang_dflash.worker.start.prewarm import FirstCalls

    FirstCalls.run = lambda self, *others: None


def _one_width_for_all() -> None:
    from sglang_dflash.worker.start.graphs import WidthGraphs

    WidthGraphs.at = lambda self, width: contextlib.nullcontext()


MUTANTS = {
    "sync": Mutant("a value is read on the host", _read_on_the_host, "reads a tensor on the host"),
    "constant": Mutant("a constant is made on the host", _host_constant, "brings host data into a graph"),
    "freed": Mutant("an input is freed after the capture", _freed_memory, "freed after the capture"),
    "stale": Mutant("a value of an earlier call is kept in Python", _stale_python_value, "blocks, accepted drafts"),
    "rope": Mutant("the RoPE table lacks rows", _short_rope_table, "outside of its tensors"),
    "commit": Mutant("a recurrent state is committed one token early", _commit_one_too_early, "tokens", "tiny-hybrid"),
    "late": Mutant("kernels are first compiled under traffic", _compiled_late, "compiled late"),
    "backend": Mutant(
        "every width runs with the full width's graphs", _one_width_for_all, "must match the size", widths=True
    ),
}


def install() -> None:
    """Plant the bug that the environment names, if any."""
    if name := os.environ.get(VARIABLE):
        MUTANTS[name].plant()


def main() -> None:
    from tests.rehearsal.run import differences, run
    from tests.rehearsal.scenarios import RANDOM_WIDTHS, Scenario, ask

    parser = ArgumentParser(prog="python -m tests.rehearsal.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MUTANTS), metavar="NAME", help=f"of {', '.join(MUTANTS)}")
    chosen = {name: MUTANTS[name] for name in parser.parse_args().names}

    def scenario(pair: str, widths: bool) -> Scenario:
        if widths:
            return Scenario("mutants", pair, (ask(pair, 2, 12),), (), width=4, graphs=(2,), options=RANDOM_WIDTHS)
        return Scenario("mutants", pair, (ask(pair, 1, 24),), (), graphs=(1,))

    scenarios = {key: scenario(*key) for key in {(mutant.pair, mutant.widths) for mutant in chosen.values()}}
    with ThreadPoolExecutor(2) as pool:
        expected = {key: pool.submit(run, scenario, rehearse=False) for key, scenario in scenarios.items()}
        found = {
            name: pool.submit(run, scenarios[mutant.pair, mutant.widths], rehearse=True, mutant=name)
            for name, mutant in chosen.items()
        }
    rows, missed = [], False
    for name, mutant in chosen.items():
        key = mutant.pair, mutant.widths
        lines = differences(scenarios[key], expected[key].result(), found[name].result())
        text = [line for report in lines for line in report.splitlines() if mutant.noticed in line]
        missed |= not text
        rows.append((name, mutant.bug, mutant.pair, text[-1][:110] if text else f"nobody: {lines}"))
    print(tabulate(rows, headers=("mutant", "planted bug", "pair", "noticed by"), tablefmt="github"))
    sys.exit(missed)


if __name__ == "__main__":
    main()
