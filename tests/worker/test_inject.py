"""What injection takes of a prefill's hidden states at a time, and the sizes that the start runs."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def rings_of(tokens: int) -> Any:
    return SimpleNamespace(window=SimpleNamespace(tokens=tokens), copies=[], copy=lambda: None)


def test_a_windowed_prefill_is_gathered_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of all kept rows would be as large as the prompt's hidden states, outside the memory budget."""
    monkeypatch.setattr(forwards, "CHUNK", 4)
    monkeypatch.setattr(forwards, "draft_tp_context", lambda layout: torch.no_grad())
    kept = torch.tensor([5, 6, 7, 8, 9, 20, 21, 22, 23])
    slots, positions = torch.arange(9) + 100, torch.arange(9)
    written: list[tuple[list[float], list[int]]] = []

    def write(pool: Any, hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        written.append((hidden[:, 0].tolist(), slots.tolist()))

    runner: Any = SimpleNamespace(token_to_kv_pool=None, model=SimpleNamespace(write_context=write))
    rings = rings_of(9)
    rings.prefill = lambda batch: (kept, positions, slots)
    hidden: Any = Hidden(30)
    Inject(runner, None, rings).prefill(None, hidden, None)
    assert hidden.copied == [4, 4, 1]
    assert [token for tokens, _ in written for token in tokens] == kept.tolist()
    assert [slot for _, at in written for slot in at] == slots.tolist()


class Drafting:
    """Requests that decode, and the drafter's pool: the content of each slot, and its writes."""

    def __init__(self, patch: pytest.MonkeyPatch, *, staged: int, **options: Any) -> None:
        patch.setattr(forwards, "draft_tp_context", lambda layout: torch.no_grad())
        patch.setattr(forwards, "STAGED", staged)
        self.pool, self.writes = dict[int, float](), 0
        self.model: Any = SimpleNamespace(staged=None, fc=SimpleNamespace(input_size=1), write_context=self.write)
        self.model.inject_staged = functools.partial(DFlashDraftModel.inject_staged, self.model)
        runner: Any = SimpleNamespace(model=self.model, max_running_requests=4, dtype=torch.float32, device="cpu")
        runner.kv_index_translator = runner.token_to_kv_pool = None
        self.inject = Inject(runner, None, **{"rings": None, **options})
        self.inject.allocate(WIDEST)
        self.free, self.rows = [*range(1, 400)], torch.arange(0)
        self.slots, self.right = list[list[int]](), list[list[float]]()  # of each request, by position
        self.number = 0.0

    def write(self, pool: Any, hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        real = [slot for slot in slots.tolist() if slot]
        assert len(real) == len(set(real)), "no order is defined inside a write"
        self.writes += 1
        self.pool.update(zip(slots.tolist(), hidden[:, 0].tolist(), strict=True))

    def join(self) -> None:
        self.slots.append([]), self.right.append([])
        self.rows = torch.arange(len(self.slots))  # SGLang replaces it when the batch's requests change

    def leave(self, number: int) -> None:
        """Another request may get its slots at the next step."""
        self.free += self.slots.pop(number)
        del self.right[number]
        self.rows = torch.arange(len(self.slots))

    def step(self, width: int, accept_lens: list[int]) -> None:
        """Draft, verify and inject; before the drafter reads its pool, every accepted token is there."""
        for slots, right in zip(self.slots, self.right, strict=True):
            slots += [self.free.pop() for _ in range(len(right) + width - len(slots))]
        positions = torch.tensor([len(right) + i for right in self.right for i in range(width)])
        slots = torch.tensor([slot for own, right in zip(self.slots, self.right, strict=True)
                              for slot in own[len(right) : len(right) + width]])  # fmt: skip
        hidden = self.number + 1 + torch.arange(len(slots)).float()
        self.number += len(slots)
        step: Any = SimpleNamespace(width=width, positions=positions, tokens=positions.view(-1, width))
        step.accepted = SimpleNamespace(accept_lens=torch.tensor(accept_lens))
        step.verified = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden[:, None]))
        step.draft_kv = SimpleNamespace(plan=SimpleNamespace(write_ids=lambda translator: slots))
        step.batch = SimpleNamespace(req_pool_indices=self.rows)
        if width > 1:
            graph = next(size for size in (1, 2, 4) if size >= len(self.rows)) * width
            self.inject.before_draft(graph)
            if self.model.staged is not None and graph <= len(self.model.staged):
                before = self.writes
                self.model.inject_staged(graph)
                self.writes = before  # by the forward itself
            self.check()
        self.inject.inject(step)
        for right, values, accepted in zip(self.right, hidden.view(-1, width).tolist(), accept_lens, strict=True):
            right += values[:accepted]

    def check(self) -> None:
        for slots, right in zip(self.slots, self.right, strict=True):
            assert [self.pool.get(slot) for slot in slots[: len(right)]] == right


WIDEST = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "all that wait is staged": {"staged": 12},
    "some": {"staged": 5},
    "a decoding server, whose freed slots a transfer may fill": {"staged": 12, "defers": False},
    "rings of two tokens": {"staged": 5, "rings": rings_of(2)},
}


@pytest.mark.parametrize("options", OPTIONS)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from((1, 1, 2, 3)), st.randoms(use_true_random=False))))
def test_the_drafter_reads_every_accepted_token_and_none_of_another_request(options: str, steps: list[Any]) -> None:
    """Requests join after a prefill, which catches up, and leave at any step."""
    with pytest.MonkeyPatch.context() as patch:
        drafting = Drafting(patch, **OPTIONS[options])
        for event, width, random in steps:
            if event < 3 and len(drafting.slots) < 4:
                drafting.inject.catch_up()
                drafting.check()
                drafting.join()
            elif event == 3 and drafting.slots:
                drafting.leave(random.randrange(len(drafting.slots)))
            if drafting.slots:
                drafting.step(width, [random.randint(1, width) for _ in drafting.slots])
        drafting.inject.catch_up()
        drafting.check()
        assert not drafting.inject.catch_up(), "a token was written twice"
        assert drafting.inject.queue is None or not drafting.inject.queue.slots.any()


@pytest.mark.parametrize(
    ("options", "widths", "writes"),
    [
        ("all that wait is staged", [1, 1, 1], 1),  # together
        ("all that wait is staged", [3, 1, 1, 3], 2),  # more than the next forward has rows; then no forward follows
        ("all that wait is staged", [3, 3, 1, 3], 2),
        ("all that wait is staged", [1, 1, 3, 3], 1),  # the last block alone
        ("some", [3, 3], 2),  # the block of two requests does not fit
        ("rings of two tokens", [1, 1, 1], 2),  # a ring has a slot for each of two tokens that wait
        ("a decoding server, whose freed slots a transfer may fill", [1, 1, 1], 3),
    ],
)
def test_tokens_wait_for_the_next_forward(
    options: str, widths: list[int], writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = Drafting(monkeypatch, **OPTIONS[options])
    drafting.join(), drafting.join()
    for width in widths:
        drafting.step(width, [width, 1])
    drafting.inject.catch_up()
    assert drafting.writes == writes


@pytest.mark.parametrize("width", [1, 3])
def test_tails_are_copied_once_their_tokens_are_written(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = rings_of(9)
    drafting = Drafting(monkeypatch, staged=12, rings=rings)
    rings.copy = lambda: (drafting.check(), rings.copies.clear())
    drafting.join(), drafting.join()
    drafting.step(1, [1, 1])
    rings.copies.append("a tail")
    drafting.step(width, [1, 1])
    assert not rings.copies


CUTLASS = (
    *("cuda", "cuda.bindings", "cuda.bindings.driver", "cutlass", "cutlass.utils", "cutlass.utils.blackwell_helpers"),
    *("cutlass.cute", "cutlass.cute.nvgpu", "cutlass.cute.runtime"),
)


@pytest.mark.parametrize("multiprocessors", [148, 160])  # of a B200 and a B300
def test_the_start_runs_every_product_that_sglang_chooses_by_the_number_of_tokens(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prewarm, "get_bf16_gemm_backend", lambda: SimpleNamespace(is_cutedsl=lambda: True))
    run: set[int] = set()
    inject: Any = SimpleNamespace(write=lambda hidden, rows, at, slots: run.add(len(slots)), queue=None)
    pool = SimpleNamespace(req_to_token=torch.zeros(1, 1))
    target: Any = SimpleNamespace(req_to_token_pool=pool, max_running_requests=1, dtype=torch.bfloat16)
    prewarm.FirstCalls(serving_plan(), target, inject, lambda bs, width, context: None)._context_kv(inject)
    with patch.dict(sys.modules, {name: MagicMock() for name in CUTLASS}):
        from sglang.kernels.ops.gemm import cutedsl_bf16_gemm as product
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(product, "get_device_sm", lambda: 100)
    monkeypatch.setattr(product, "get_device_core_count", lambda device: multiprocessors)

    def chosen(tokens: Any, hidden: int, captured: int) -> set[int]:
        of_fc = hidden, captured * hidden
        return {product._pick_tactic(n, *of_fc) for n in tokens if product.use_cutedsl_bf16_gemm(n, *of_fc)}

    drafters = [(hidden, captured) for hidden in range(512, 6145, 128) for captured in range(1, 6144 // hidden + 1)]
    late = {shape: chosen(range(1, CHUNK + 1), *shape) - chosen(run, *shape) for shape in drafters}
    assert not {shape: tactics for shape, tactics in late.items() if tactics}
    assert chosen(run, 2560, 2), "no product of these was chosen"
