"""What injection takes of a prefill's hidden states at a time, and the sizes that the start runs."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang_dflash.model.drafter import DFlashDraftModel
from sglang_dflash.worker import forwards
from sglang_dflash.worker.forwards import CHUNK, Inject
from sglang_dflash.worker.start import prewarm
from tests.support.configs import serving_plan

pytestmark = pytest.mark.sglang


class Hidden:
    """A prefill's hidden states; notes how many rows each read copies."""

    device = torch.device("cpu")

    def __init__(self, tokens: int) -> None:
        self.states = torch.arange(tokens, dtype=torch.float32)[:, None]
        self.copied: list[int] = []

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        found = self.states[rows]
        if isinstance(rows, Tensor):
            self.copied.append(len(found))
        return found


def test_a_windowed_prefill_is_gathered_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of all kept rows would be as large as the prompt's hidden states, outside the memory budget."""
    monkeypatch.setattr(forwards, "CHUNK", 4)
    monkeypatch.setattr(forwards, "draft_tp_context", lambda layout: torch.no_grad())
    kept = torch.tensor([5, 6, 7, 8, 9, 20, 21, 22, 23])
    slots, positions = torch.arange(9) + 100, torch.arange(9)
    written: list[tuple[list[float], list[int]]] = []

    def set_kv_buffer(layer: Any, where: Any, k: Tensor, v: Tensor, *scales: Any) -> None:
        written.append((k.flatten().tolist(), where.loc.tolist()))

    layer = SimpleNamespace(k_scale=None, v_scale=None)
    projection = SimpleNamespace(attentions=[SimpleNamespace(attn=layer)])
    model: Any = SimpleNamespace(
        context_kv=lambda hidden, positions: (hidden[None], hidden[None]), _context_projection=projection
    )
    model.write_context = functools.partial(DFlashDraftModel.write_context, model)
    runner: Any = SimpleNamespace(token_to_kv_pool=SimpleNamespace(set_kv_buffer=set_kv_buffer), model=model)
    rings: Any = SimpleNamespace(window=SimpleNamespace(tokens=9), prefill=lambda batch: (kept, positions, slots))
    hidden: Any = Hidden(30)
    Inject(runner, None, rings).prefill(None, hidden, None)
    assert hidden.copied == [4, 4, 1]
    assert [token for tokens, _ in written for token in tokens] == kept.tolist()
    assert [slot for _, at in written for slot in at] == slots.tolist()


@functools.cache
def rows_of(rids: str) -> Tensor:
    """The batch's rows, the same tensor at every step of the same requests."""
    return torch.arange(len(rids))


def a_step(rids: list[str], position: int, width: int = 1, accept_len: int | None = None) -> Any:
    count = len(rids) * width
    accepted = SimpleNamespace(accept_lens=torch.full((len(rids),), accept_len or width))
    positions = torch.full((count,), position)
    return SimpleNamespace(
        width=width,
        positions=positions,
        tokens=positions.view(-1, width),
        accepted=accepted,
        verified=SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.full((count, 1), float(position)))),
        draft_kv=SimpleNamespace(plan=SimpleNamespace(write_ids=lambda translator: positions * 10)),
        batch=SimpleNamespace(req_pool_indices=rows_of("".join(rids))),
    )


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> tuple[Inject, list[list[int]]]:
    """An injection, and the positions that each write brought."""
    written: list[list[int]] = []
    monkeypatch.setattr(forwards, "draft_tp_context", lambda layout: torch.no_grad())
    model: Any = SimpleNamespace(
        staged=None,
        fc=SimpleNamespace(input_size=1),
        write_context=lambda pool, hidden, positions, slots: written.append(positions.tolist()),
    )
    model.inject_staged = functools.partial(DFlashDraftModel.inject_staged, model)
    runner: Any = SimpleNamespace(
        kv_index_translator=None,
        token_to_kv_pool=None,
        model=model,
        max_running_requests=4,
        dtype=torch.float32,
        device="cpu",
        decode_cuda_graph_runner=SimpleNamespace(capture_bs=[1, 2, 4]),
    )
    return Inject(runner, None, None), written


def test_plainly_decoded_tokens_are_injected_together(injected: tuple[Inject, list[list[int]]]) -> None:
    injection, written = injected
    for position in range(3):
        injection.inject(a_step(["a", "b"], position))
    assert written == []
    injection.catch_up()
    injection.catch_up()
    assert written == [[0, 0, 1, 1, 2, 2]]


def test_another_batch_does_not_wait_with_the_last_one(injected: tuple[Inject, list[list[int]]]) -> None:
    """A slot of a request that has left may be another's by then."""
    injection, written = injected
    injection.inject(a_step(["a", "b"], 7))
    injection.inject(a_step(["b"], 8))
    assert written == [[7, 7]]


def test_nothing_waits_where_a_transfer_fills_the_slots(injected: tuple[Inject, list[list[int]]]) -> None:
    """A decoding server's freed slots are written by the next request's transfer, which no call of ours precedes."""
    injection, written = injected
    injection._defers = False
    injection.inject(a_step(["a", "b"], 3))
    assert written == [[3, 3]]
    assert not injection.catch_up()


@pytest.mark.parametrize(
    ("requests", "staged_width", "next_requests", "next_width", "written"),
    [
        (2, 3, 2, 3, []),
        (2, 3, 1, 3, [[5] * 6]),  # more tokens than the next forward has rows
        (2, 2, 3, 3, [[5] * 4]),  # the next forward's graph, of four requests, has more rows than may be staged
        (1, 3, 2, 2, []),  # of another batch
        (4, 3, 4, 3, [[5] * 12]),  # too many to be staged
        (2, 3, 0, 0, [[5] * 6]),  # no forward follows
    ],
)
def test_the_next_forward_injects_a_block_if_it_has_as_many_rows(
    injected: tuple[Inject, list[list[int]]], requests: int, staged_width: int, next_requests: int, next_width: int,
    written: list[list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    injection, found = injected
    monkeypatch.setattr(forwards, "STAGED", 10)
    injection.stage(3)
    injection.inject(a_step(list("abcd")[:requests], 5, staged_width))
    staged: Any = injection._drafter.model.staged
    if found != written:
        assert staged.slots.tolist() == [50] * len(staged.slots[: requests * staged_width]) + [0] * (
            len(staged) - requests * staged_width
        )
    if next_requests:
        injection.before_draft(a_step(list("xyz")[:next_requests], 9, next_width), next_width)
    else:
        injection.catch_up()
    assert found == written
    assert not injection.catch_up() and found == written
    assert staged.slots.any() == (not written)  # the forward clears those that it takes


@pytest.mark.parametrize(
    ("plain_steps", "next_requests", "next_width", "written", "staged_positions"),
    [
        (2, 2, 3, [], [5, 5, 6, 6]),
        (4, 2, 3, [[5, 5, 6, 6, 7, 7, 8, 8]], []),  # more tokens than the next forward has rows
        (2, 3, 3, [[5, 5, 6, 6]], []),  # the next forward's graph, of four requests, has more rows than may be staged
    ],
)
def test_the_next_forward_injects_plainly_decoded_tokens_if_it_has_as_many_rows(
    injected: tuple[Inject, list[list[int]]], plain_steps: int, next_requests: int, next_width: int,
    written: list[list[int]], staged_positions: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    injection, found = injected
    monkeypatch.setattr(forwards, "STAGED", 10)
    injection.stage(3)
    for position in range(5, 5 + plain_steps):
        injection.inject(a_step(["a", "b"], position))
    caught_up = injection.before_draft(a_step(list("xyz")[:next_requests], 9, next_width), next_width)
    assert found == written and caught_up == bool(written)
    staged: Any = injection._drafter.model.staged
    filled = slice(len(staged_positions))
    assert staged.slots.tolist() == [10 * at for at in staged_positions] + [0] * (len(staged) - len(staged_positions))
    assert staged.positions[filled].tolist() == staged.hidden[filled, 0].tolist() == staged_positions


@pytest.mark.parametrize(
    ("plain_steps", "next_width", "written", "slots"),
    [
        (1, 4, [], [50, 0, 0, 60, 0]),  # the next forward injects block and plain token
        (1, 3, [[5, 5, 5, 6]], [0] * 5),  # it has fewer rows: one write of all
        (3, 4, [[5, 5, 5], [6, 7, 8]], [0] * 5),  # more than the memory holds
    ],
)
def test_tokens_decoded_after_a_block_follow_its_accepted_ones(
    injected: tuple[Inject, list[list[int]]], plain_steps: int, next_width: int, written: list[list[int]],
    slots: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The plain token has the slot of a rejected one, and no order is defined inside a write."""
    injection, found = injected
    monkeypatch.setattr(forwards, "STAGED", 5)
    injection.stage(5)
    injection.inject(a_step(["a"], 5, 3, accept_len=1))
    for position in range(6, 6 + plain_steps):
        injection.inject(a_step(["a"], position))
    injection.before_draft(a_step(["a"], 9, next_width), next_width)
    staged: Any = injection.staged
    assert found == written and staged.slots.tolist() == slots


def test_another_batchs_tokens_do_not_follow_a_block(injected: tuple[Inject, list[list[int]]]) -> None:
    """They may have the slot of a request that left."""
    injection, found = injected
    injection.stage(5)
    injection.inject(a_step(["a", "b"], 5, 2))
    injection.inject(a_step(["b"], 6))
    assert found == [[5] * 4]


def test_a_ring_has_a_slot_for_every_token_that_waits(injected: tuple[Inject, list[list[int]]]) -> None:
    injection, written = injected
    rings: Any = SimpleNamespace(window=SimpleNamespace(tokens=2))
    injection = Inject(injection._drafter, None, rings)
    for position in range(3):
        injection.inject(a_step(["a"], position))
    assert written == [[0, 1]]


CUTEDSL = {
    *("use_cutedsl_bf16_gemm", "_pick_tactic", "_grid_ctas"),
    *("_TGV_TACTIC_LADDER", "_MUSE_SPARK_TGV_M_RANGES", "_K3_TGV_WIN_SHAPES", "_K3_FRONT_WARP_SPLITK"),
}


def cutedsl_product(multiprocessors: int) -> dict[str, Any]:
    """SGLang's choice of a CuTe DSL product on sm_100, from its source: the module needs CUTLASS."""
    spec = importlib.util.find_spec("sglang.kernels.ops.gemm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("cutedsl_bf16_gemm.py").read_text())

    def is_needed(node: Any) -> bool:
        targets = (getattr(target, "id", None) for target in getattr(node, "targets", ()))
        return not CUTEDSL.isdisjoint((getattr(node, "name", None), *targets))

    found: dict[str, Any] = {
        "torch": SimpleNamespace(cuda=SimpleNamespace(current_device=lambda: 0)),
        "get_device_sm": lambda: 100,
        "get_device_core_count": lambda device: multiprocessors,
    }
    exec(compile(ast.Module(list(filter(is_needed, tree.body)), []), "SGLang's choice", "exec"), found)
    return found


@pytest.mark.parametrize("multiprocessors", [148, 160])  # of a B200 and a B300
def test_the_start_runs_every_product_that_sglang_chooses_by_the_number_of_tokens(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prewarm, "get_bf16_gemm_backend", lambda: SimpleNamespace(is_cutedsl=lambda: True))
    run: set[int] = set()
    inject: Any = SimpleNamespace(write=lambda hidden, rows, at, slots: run.add(len(slots)), staged=None)
    pool = SimpleNamespace(req_to_token=torch.zeros(1, 1))
    target: Any = SimpleNamespace(req_to_token_pool=pool, max_running_requests=1, dtype=torch.bfloat16)
    prewarm.FirstCalls(serving_plan(), target, inject, lambda bs, width, context: None)._context_kv(inject)
    product = cutedsl_product(multiprocessors)

    def chosen(tokens: Any, hidden: int, captured: int) -> set[int]:
        of_fc = hidden, captured * hidden
        return {product["_pick_tactic"](n, *of_fc) for n in tokens if product["use_cutedsl_bf16_gemm"](n, *of_fc)}

    drafters = [(hidden, captured) for hidden in range(512, 6145, 128) for captured in range(1, 6144 // hidden + 1)]
    late = {shape: chosen(range(1, CHUNK + 1), *shape) - chosen(run, *shape) for shape in drafters}
    assert not {shape: tactics for shape, tactics in late.items() if tactics}
    assert chosen(run, 2560, 2), "no product of these was chosen"
