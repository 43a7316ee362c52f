"""The model calls of a step: draft, verify, and inject, which writes the drafter's context K/V."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.spec_utils import draft_tp_context, prepare_mamba_track_for_verify
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from sglang_dflash.features.seeds import Seeds
from sglang_dflash.features.window import DraftRings
from sglang_dflash.launch.division import STAGED
from sglang_dflash.model.drafter import StagedContext
from sglang_dflash.ops import stage_block, take_drafts
from sglang_dflash.step.step import Step
from sglang_dflash.worker.draft_graphs import DraftGraphs
from sglang_dflash.worker.layout import ForwardBatches

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner

CHUNK = 2048  # tokens: the workspace is not budgeted, and this many saturate a GPU
MAX_WAITING = 16  # at most so many plain steps wait to be injected together


class Draft:
    """Drafts the block.

    ``width`` counts the positions of the drafter's own block, anchor included.

    ``broken``, int64 [], counts drafted positions whose hidden state was not finite.
    """

    def __init__(
        self, drafter: ModelRunner, ranks: Any, rings: DraftRings | None, inject: Inject, seeds: Seeds, width: int
    ) -> None:
        self._drafter, self._ranks, self._rings, self._inject = drafter, ranks, rings, inject
        self._seeds, self._width, self._batches = seeds, width, ForwardBatches(drafter, CaptureHiddenMode.NULL)
        drafter.model.noise = seeds.noise
        self.broken = torch.zeros((), dtype=torch.int64, device=drafter.device)

    def graphs_of(self, step: Step) -> DraftGraphs | None:
        """Return the graphs that draft for a step without a forward of SGLang, or None."""
        graphs = self._drafter.decode_cuda_graph_runner
        serves = isinstance(graphs, DraftGraphs) and step.width > 1 and len(step.tokens) <= graphs.max_bs
        return graphs if serves else None

    def draft(self, step: Step) -> None:
        """Fill ``step.tokens``, ``step.margins`` and ``step.draft_kv``; width 1 needs ``draft_kv`` only."""
        translator = self._drafter.kv_index_translator
        if self._rings is not None:
            step.draft_kv = self._rings.view(step.target_kv, step.positions, step.batch, translator)
        if step.width == 1:
            return
        self._seeds.publish_noise(step.batch)
        output, bs = self._forward(step), len(step.tokens)
        # a graph pads the batch and overwrites its outputs
        margins = None if output.margins is None else output.margins[:bs]
        step.margins = take_drafts(step.tokens, output.drafts[:bs], output.broken[:bs], self.broken, margins)

    def _forward(self, step: Step) -> Any:
        rows, width = len(step.tokens), min(step.width, self._width)
        if (graphs := self.graphs_of(step)) is not None:
            rows = padded(graphs, rows)
            step.caught_up = self._inject.before_draft(rows * width)
            return graphs.replay(step, rows)
        block = step.first(self._width, self._drafter.kv_index_translator) if step.width > self._width else step
        forward_batch, runner = self._batches(block, block.draft_kv), self._drafter.decode_cuda_graph_runner
        if isinstance(runner, DecodeCudaGraphRunner) and runner.can_run_graph(forward_batch):
            rows = padded(runner, rows)
        step.caught_up = self._inject.before_draft(rows * width)
        with draft_tp_context(self._ranks):
            return self._drafter.forward(forward_batch).logits_output


def padded(graphs: DecodeCudaGraphRunner, bs: int) -> int:
    """Return the requests of the smallest captured graph for ``bs`` requests."""
    return next(size for size in graphs.capture_bs if size >= bs)


class NoDrafter:
    """The drafter's stages of a server that only copies."""

    def __init__(self, device: torch.device | str) -> None:
        self.broken = torch.zeros((), dtype=torch.int64, device=device)

    def graphs_of(self, step: Step) -> None:
        return None

    def draft(self, step: Step) -> None:
        if step.width > 1:
            step.margins = torch.full_like(step.tokens[:, 1:], -torch.inf, dtype=torch.float32)

    def inject(self, step: Step) -> None:
        pass

    def prefill(self, batch: ScheduleBatch, hidden: Tensor, kv_loc_plan: Any) -> None:
        pass


class Verify:
    """Runs the target over the block; width 1 is plain decoding, which advances recurrent states in place."""

    def __init__(self, target_worker: TpModelWorker) -> None:
        self._target = target_worker
        self._batches = ForwardBatches(target_worker.model_runner, CaptureHiddenMode.FULL)

    def plan(self, step: Step) -> None:
        """Fill the graph's inputs and plan its attention before the draft is launched. The drafts are copied later."""
        batch, graphs = self._batches(step, step.target_kv), self._target.model_runner.decode_cuda_graph_runner
        if graphs is not None and graphs.can_run_graph(batch):
            graphs.load_batch(batch)
            batch.mark_forward_metadata_ready()
        step.planned = batch

    def verify(self, step: Step) -> None:
        # stores snapshot slots on the batch, for SGLang's commit, and clears a prefill's mask
        if step.track_every or step.batch.mamba_track_mask is not None:
            prepare_mamba_track_for_verify(step.batch)
        forward_batch = step.planned or self._batches(step, step.target_kv)
        step.verified = self._target.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)

    def idle(self, batch: ScheduleBatch, width: int) -> None:
        """Run the forward without requests while other ranks verify blocks of ``width`` (DP attention)."""
        forward_batch = self._batches.idle(batch, width)
        self._target.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)


class Inject:
    """Projects the target's hidden states to the drafter's context K/V and writes them to its pool.

    Tokens of steps wait in ``queue``, whose first rows the drafter's graphs inject. Without a draft window both pools
    have equal slot numbers, so requests share the drafter's K/V of cached prefixes. ``defers`` is whether tokens may
    wait: not on a decoding server, where a transfer may reuse freed slots first, and not with a hierarchical cache.
    """

    def __init__(self, drafter: ModelRunner, ranks: Any, rings: DraftRings | None, *, defers: bool = True) -> None:
        self._drafter, self._ranks, self._rings, self._defers = drafter, ranks, rings, defers
        # a ring has a slot for each waiting token
        self._most_steps = MAX_WAITING if rings is None else min(MAX_WAITING, rings.window.tokens)
        self.queue: StagedContext | None = None
        self._waiting, self._plain = 0, False  # waiting rows of the queue; whether some are of plain steps
        self._rows: Tensor | None = None  # SGLang replaces it when the batch's requests change

    def allocate(self, width: int) -> None:
        """Allocate the queue; before the drafter's graphs are captured."""
        model, pool = self._drafter.model, self._drafter.token_to_kv_pool
        tokens = min(STAGED, self._drafter.max_running_requests * width)
        if self._defers:
            hidden = torch.zeros(tokens, model.fc.input_size, dtype=self._drafter.dtype, device=self._drafter.device)
            positions, slots = torch.zeros(2, tokens, dtype=torch.int64, device=self._drafter.device)
            self.queue = model.staged = StagedContext(hidden, positions, slots, pool)

    def inject(self, step: Step) -> None:
        """Queue the step's accepted tokens, or write its whole block: the next block overwrites rejected positions."""
        positions, slots = step.positions, self._slots(step.draft_kv.plan)
        hidden, rows = step.verified.logits_output.hidden_states[: len(positions)], step.batch.req_pool_indices
        queue, tokens, most = self.queue, len(positions), self._most_steps * len(rows)
        is_full = queue is not None and self._waiting + tokens > min(len(queue), most)
        if rows is not self._rows or is_full or self._moves:
            self.catch_up()
            self._rows = rows
        # an eager drafter gains nothing from a queue
        if queue is None or tokens > len(queue) or (step.width > 1 and self._drafter.model.staged is None):
            self.write(hidden, None, positions, slots)
        else:
            free = (part[self._waiting :] for part in queue.tensors)
            stage_block(hidden, positions, slots, step.accepted.accept_lens, *free)
            self._waiting, self._plain = self._waiting + tokens, self._plain or step.width == 1

    def before_draft(self, rows: int) -> bool:
        """Write the queue if a graph of ``rows`` tokens, padding included, has too few rows to inject it.

        The rows of a graph inject the tokens of any request. Return as :meth:`catch_up`.
        """
        staged = self._drafter.model.staged
        if self._waiting > (rows if staged is not None and rows <= len(staged) else 0) or self._moves:
            return self.catch_up()
        self._waiting, self._plain = 0, False
        return False

    def catch_up(self) -> bool:
        """Write the queue, before the drafter reads its tokens or another request gets their slots.

        Return whether tokens of plain steps were among them.
        """
        plain, waiting, self._waiting, self._plain = self._plain, self._waiting, 0, False
        if waiting:
            assert self.queue is not None
            hidden, positions, slots = self.queue.tensors
            self.write(hidden, None, positions[:waiting], slots[:waiting])
            slots[:waiting].zero_()
        if self._rings is not None:
            self._rings.copy()
        return plain

    def prefill(self, batch: ScheduleBatch, hidden: Tensor, kv_loc_plan: Any) -> None:
        """Inject the tokens of a target extend: ``hidden`` [T, K * H], requests concatenated."""
        self.catch_up()
        if self._rings is not None:
            self.write(hidden, *self._rings.prefill(batch))
            return
        lens = async_h2d([batch.prefix_lens, batch.extend_lens], dtype=torch.int64, device=hidden.device)
        prefix, extend = lens
        total = sum(batch.extend_lens)
        shift = prefix - (extend.cumsum(0) - extend)
        positions = shift.repeat_interleave(extend, output_size=total) + torch.arange(total, device=hidden.device)
        self.write(hidden, None, positions, self._slots(kv_loc_plan))

    @property
    def _moves(self) -> bool:
        return self._rings is not None and bool(self._rings.copies)

    def _slots(self, kv_loc_plan: Any) -> Tensor:
        slots: Tensor = kv_loc_plan.write_ids(self._drafter.kv_index_translator)
        return slots

    def write(self, hidden: Tensor, rows: Tensor | None, positions: Tensor, slots: Tensor) -> None:
        """Write context K/V of ``rows`` (else the first T) of ``hidden`` at ``positions`` and ``slots``, int64 [T]."""
        pool, model = self._drafter.token_to_kv_pool, self._drafter.model
        with draft_tp_context(self._ranks):
            for start in range(0, len(positions), CHUNK):
                chunk = slice(start, min(start + CHUNK, len(positions)))
                part = hidden[chunk if rows is None else rows[chunk]]
                model.write_context(pool, part, positions[chunk], slots[chunk])
