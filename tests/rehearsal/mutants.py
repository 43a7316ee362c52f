"""Planted bugs, as negative controls: each must be noticed, and by the check that is there for its kind.

``python -m tests.rehearsal.mutants`` plants one after the other and prints who noticed it.
"""

from __future__ import annotations

import contextlib
import functools
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
        noticed: words of the line that must report it; empty for what is no bug, of which nothing may be reported.
        pair: the pair whose engine it is planted in.
        widths: whether every step has another width, in batches of two.
        replay: whether recurrent states are replayed.
        exact: whether it is planted in an exact server, which is compared with plain decoding.
    """

    bug: str
    plant: Callable[[], None]
    noticed: str
    pair: str = "tiny-dense"
    widths: bool = False
    replay: bool = False
    exact: bool = False

    @property
    def server(self) -> tuple[str, bool, bool, bool]:
        """What decides the server that it is planted in."""
        return self.pair, self.widths, self.replay, self.exact


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


def _wrong_stride() -> None:
    from sglang_dflash.model.attention import QKNormRope

    def rotate_skewed(self: Any, heads: Any, weights: Any, positions: Any) -> Any:
        layer, token, head, lane = heads.stride()
        return rotate(self, heads.as_strided(heads.shape, (layer, token - head, head, lane)), weights, positions)

    rotate, QKNormRope.rotate = QKNormRope.rotate, rotate_skewed


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


def _wrong_commit_kernel() -> None:
    from sglang_dflash.states import replay

    commit = replay.gdn_commit
    replay.gdn_commit = lambda states, records, rows, slots, counts, *track: commit(
        states, records, rows, slots, counts - 1, *track
    )


def _float32_beta() -> None:
    from sglang_dflash.states import stepped

    def with_float32_gate(mixed: Any, a: Any, b: Any, *others: Any, **options: Any) -> None:
        decode(mixed, a, b.float(), *others, **options)  # the kernel rounds beta to the dtype of b

    decode = stepped.fused_recurrent_gated_delta_rule_packed_decode
    stepped.fused_recurrent_gated_delta_rule_packed_decode = with_float32_gate


def _compiled_late() -> None:
    from sglang_dflash.worker.start.prewarm import FirstCalls

    FirstCalls.run = lambda self, *others: None


def _one_width_for_all() -> None:
    from sglang_dflash.worker.start.graphs import WidthGraphs

    WidthGraphs.at = lambda self, width: contextlib.nullcontext()


def by_the_calls_width(target_verify: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's Triton verify with FlashInfer's addresses: the state of request i after position t is entry i * T + t,
    where T is the call's width. What a call does not write is no state of any request."""

    @functools.wraps(target_verify)  # the start compares its parameters
    def verify(self: Any, *, query_start_loc: Any, intermediate_states_buffer: Any, **call: Any) -> Any:
        requests = len(query_start_loc) - 1
        width = call["q"].shape[1] // requests
        intermediate_states_buffer.fill_(100.0)
        entries = intermediate_states_buffer.flatten(0, 1)[: requests * width].unflatten(0, (requests, width))
        return target_verify(self, query_start_loc=query_start_loc, intermediate_states_buffer=entries, **call)

    return verify


def _flashinfer_addresses() -> None:
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    TritonGDNKernel.target_verify = by_the_calls_width(TritonGDNKernel.target_verify)


def _flashinfer_addresses_in_the_servers_layout() -> None:
    from sglang_dflash.worker.start import graphs

    graphs.packed = lambda cache, width: cache
    _flashinfer_addresses()


MUTANTS = {
    "sync": Mutant("a value is read on the host", _read_on_the_host, "reads a tensor on the host"),
    "constant": Mutant("a constant is made on the host", _host_constant, "brings host data into a graph"),
    "freed": Mutant("an input is freed after the capture", _freed_memory, "freed after the capture"),
    "stale": Mutant("a value of an earlier call is kept in Python", _stale_python_value, "blocks, accepted drafts"),
    "stride": Mutant("a kernel is given another tensor's stride", _wrong_stride, "blocks, accepted drafts"),
    "rope": Mutant("the RoPE table lacks rows", _short_rope_table, "outside of its tensors"),
    "commit": Mutant("a recurrent state is committed one token early", _commit_one_too_early, "tokens", "tiny-hybrid"),
    "kernel": Mutant(
        "a kernel of the state replay is wrong", _wrong_commit_kernel, "STATE_REPLAY=0", "tiny-hybrid", replay=True
    ),
    "beta": Mutant(
        "an exact verify keeps beta in float32",
        _float32_beta,
        "log-probabilities",
        "tiny-hybrid",
        replay=True,
        exact=True,
    ),
    "late": Mutant("kernels are first compiled under traffic", _compiled_late, "compiled late"),
    "backend": Mutant(
        "every width runs with the full width's graphs", _one_width_for_all, "must match the size", widths=True
    ),
    "layout": Mutant(
        "a verify with FlashInfer's addresses, states laid out for wide blocks",
        _flashinfer_addresses_in_the_servers_layout,
        "tokens",
        "tiny-hybrid",
        widths=True,
    ),
    "addresses": Mutant(
        "none: a verify with FlashInfer's addresses", _flashinfer_addresses, "", "tiny-hybrid", widths=True
    ),
}


def install() -> None:
    """Plant the bug that the environment names, if any."""
    if name := os.environ.get(VARIABLE):
        MUTANTS[name].plant()


def main() -> None:
    from tests.rehearsal.run import differences, run
    from tests.rehearsal.scenarios import EXACT, RANDOM_WIDTHS, REPLAY, Scenario, ask, measured

    parser = ArgumentParser(prog="python -m tests.rehearsal.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MUTANTS), metavar="NAME", help=f"of {', '.join(MUTANTS)}")
    chosen = {name: MUTANTS[name] for name in parser.parse_args().names}

    def scenario(pair: str, widths: bool, replay: bool, exact: bool) -> Scenario:
        environment = REPLAY if replay else {}
        if exact:
            asked, more = measured(ask(pair, 1, 6, cut=24)), {"width": 4, "options": EXACT, "exact": True}
            return Scenario("mutants", pair, (asked,), (), graphs=(1,), environment=environment, **more)
        if widths:
            return Scenario("mutants", pair, (ask(pair, 2, 12),), (), width=4, graphs=(2,), options=RANDOM_WIDTHS)
        return Scenario("mutants", pair, (ask(pair, 1, 24),), (), graphs=(1,), environment=environment)

    scenarios = {server: scenario(*server) for server in sorted({mutant.server for mutant in chosen.values()})}
    with ThreadPoolExecutor(2) as pool:
        expected = {key: pool.submit(run, scenario, rehearse=False) for key, scenario in scenarios.items()}
        found = {
            name: pool.submit(run, scenarios[mutant.server], rehearse=True, mutant=name)
            for name, mutant in chosen.items()
        }
    rows, missed = [], False
    for name, mutant in chosen.items():
        key = mutant.server
        lines = differences(scenarios[key], expected[key].result(), found[name].result())
        text = [line for report in lines for line in report.splitlines() if mutant.noticed in line]
        wrong = bool(text) != bool(mutant.noticed)
        missed |= wrong
        seen = text[-1][:110] if text else "nobody"
        rows.append((name, mutant.bug, mutant.pair, f"WRONG: {lines}" if wrong else seen))
    print(tabulate(rows, headers=("mutant", "planted bug", "pair", "noticed by"), tablefmt="github"))
    sys.exit(missed)


if __name__ == "__main__":
    main()
