"""The DFLASH worker: what SGLang's scheduler calls, and a decode step from its first stage to its last."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.drafter.served import drafter_config, mask_embedding
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.upstream import (
    BaseSpecWorker,
    CaptureHiddenMode,
    DraftParallelSpec,
    DraftTPExecution,
    GenerationBatchResult,
    build_draft_tp_worker,
    draft_pp_context,
    draft_tp_context,
    get_disagg,
    get_parallel,
    get_spec,
    resolve_draft_parallel_layout,
)
from sglang_dflash.width import CostTable, FixedWidth, WidthConfig, WidthPolicy, asked_for, build_policy
from sglang_dflash.window.rings import DraftRings, RowAllocator
from sglang_dflash.window.served import DraftWindow, served_window
from sglang_dflash.worker import transfer
from sglang_dflash.worker.accept import Accept
from sglang_dflash.worker.calibrate import Calibration
from sglang_dflash.worker.cut import cut
from sglang_dflash.worker.draft import Draft
from sglang_dflash.worker.graphs import WidthGraphs
from sglang_dflash.worker.inject import Inject
from sglang_dflash.worker.observe import pools, shared_times
from sglang_dflash.worker.observe.broken_drafts import BrokenDrafts
from sglang_dflash.worker.observe.info import allocated_bytes, banner, identity
from sglang_dflash.worker.observe.metrics import step_metrics
from sglang_dflash.worker.observe.no_sync import sync_guard
from sglang_dflash.worker.observe.pauses import PauseLog
from sglang_dflash.worker.observe.shared_times import SharedTimes
from sglang_dflash.worker.observe.stats import Stages, StepStats
from sglang_dflash.worker.observe.steps import StepRecord, Steps
from sglang_dflash.worker.recurrent import RecurrentCommit
from sglang_dflash.worker.state import DraftState
from sglang_dflash.worker.step import Step
from sglang_dflash.worker.transfer import KeptOnHost
from sglang_dflash.worker.verify import Verify

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch, ServerArgs, TpModelWorker

logger = logging.getLogger(__name__)

Publish = Callable[[Tensor], None]
GrammarBarrier = Callable[[], None]


class DFlashWorker(BaseSpecWorker):
    """Drafts a block with the drafter, verifies it with the target, commits what the target agrees with.

    One instance per tensor-parallel rank. The scheduler owns the requests, the KV slots and the relay between
    steps; the worker owns the drafter and the order of a step's stages. Nothing between draft and publish
    waits for the device.

    Args:
        target_worker: SGLang's ``TpModelWorker`` of the target, weights loaded.

    Raises:
        DFlashError: the drafter's configuration or tensors are unusable, or it does not fit the target.
    """

    speculative_num_steps = 1

    def __init__(self, *, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.drafter_config = drafter_config()
        self._widths, self._ragged = asked_for(server_args), False
        self.width_policy: WidthPolicy = FixedWidth(get_spec().speculative_num_draft_tokens)
        self._window = served_window()
        self._rings: DraftRings | None = None
        spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
        self.draft_parallel_layout = resolve_draft_parallel_layout(spec, collapse_cp=True)
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            self._draft_worker = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=target_worker.model_runner.model_config,
                algo_label="DFLASH",
            ).draft_worker
        runner = self._draft_worker.model_runner
        vocabulary = TargetVocabulary.of(
            target_worker.model_runner.model,
            mask_token_id=self.drafter_config.mask_token_id,
            mask_embedding=mask_embedding(),
        )
        runner.model.set_vocabulary(vocabulary)
        first_rank = get_parallel().tp_rank == 0
        self._stats, self._stages = StepStats(), Stages(target_worker.device)
        self._steps = Steps(target_worker.device, log=first_rank)
        self._step_times = SharedTimes(lambda *news: self.width_policy.observe_time(*news), get_parallel().tp_size)
        shared_times.serve(self._step_times)
        self._pauses = PauseLog(first_rank)
        self._broken = BrokenDrafts(target_worker.device, first_rank)
        self._no_sync = sync_guard(target_worker.device)
        self._metrics = step_metrics(self.width_policy.max_width)
        self.identity = identity(
            self.drafter_config,
            target=target_worker.model_runner.model_config.model_path,
            drafter=runner.model_config.model_path,
            max_width=self.width_policy.max_width,
            adaptive=self._widths is not None,
            window=None if self._window is None else self._window.tokens,
            draft_attention_backend=runner.draft_attention_backend,
        )
        if first_rank:
            logger.info(banner(self.identity))

    def __getattr__(self, name: str) -> Any:
        """The scheduler asks this worker for whatever it asks a target's worker for."""
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    # --- read by the scheduler

    @property
    def speculative_num_draft_tokens(self) -> int:
        return self.width_policy.max_width

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return self._target_worker.model_runner.attn_backend, self._draft_worker.model_runner.attn_backend

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("draft", self._draft_worker.model_runner)]

    def server_info(self) -> dict[str, Any]:
        """What ``/server_info`` shows of this worker: its identity, its counters and what it allocated."""
        memory = allocated_bytes(self._target_worker.model_runner, self._draft_worker.model_runner)
        counters = {
            **self._stats.as_dict(),
            "broken_drafts": self._broken.collect(),
            "stage_seconds": self._stages.collect(),
        }
        return {**self.identity, **counters, "width": self.width_policy.describe(), "memory_bytes": memory}

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """A step's accept counts reached the host, without anyone waiting for them; steps come in launch order."""
        record = self._steps.counted([n + 1 for n in num_correct_drafts_per_req])
        self._stats.count(record)
        self.width_policy.observe(record.width, record.accept_lens, record.verify_lens)
        self._step_times.measured(timed := self._steps.timed())
        self._stages.collect()
        broken = self._broken.collect()
        if self._metrics is not None:
            self._metrics.observe(record, timed, self.width_policy, broken)
        self._pauses.tell(self.width_policy.paused)

    # --- start-up, in call order

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        with draft_tp_context(self.draft_parallel_layout):
            if self._window is None:
                super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
            else:
                self._alloc_rings(self._window, memory_pool_config, req_to_token_pool)
                self.req_to_token_pool, self.token_to_kv_pool_allocator = req_to_token_pool, token_to_kv_pool_allocator
        target, drafter = self._target_worker, self._draft_worker.model_runner
        self._lay_out = partial(
            Step.lay_out, runner=target.model_runner, mask_token_id=self.drafter_config.mask_token_id
        )
        self._draft = Draft(drafter, self.draft_parallel_layout, self._rings, self._broken)
        self._verify = Verify(target)
        self._accept = Accept(target.model_runner, get_parallel().tp_group)
        self._commit = RecurrentCommit(target)
        role = get_disagg().disaggregation_mode
        self._inject = Inject(drafter, self.draft_parallel_layout, self._rings, defers=role != "decode")
        if role == "decode":
            KeptOnHost(token_to_kv_pool_allocator, drafter.token_to_kv_pool, self._rings)
        if role != "null" and self._rings is not None:
            transfer.announce(self._rings, drafter.token_to_kv_pool)

    def _alloc_rings(self, window: DraftWindow, target_config: Any, request_pool: Any) -> None:
        context = self._target_worker.model_runner.model_config.context_len
        by_row = get_disagg().disaggregation_mode != "null"
        self._rings = rings = DraftRings(request_pool, window, context, by_row=by_row)
        self._draft_worker.alloc_memory_pool(
            memory_pool_config=rings.pool_config(target_config),
            req_to_token_pool=rings.request_pool,
            token_to_kv_pool_allocator=RowAllocator(),
        )

    def _draft_model_runners(self) -> tuple[Any, ...]:
        """Runners whose KV slots are the target's, for SGLang to move and copy with them; a ring's are not."""
        return () if self._rings is not None else super()._draft_model_runners()

    def init_attention_backends(self) -> None:
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            super().init_cuda_graphs()
        target, drafter = self._target_worker.model_runner, self._draft_worker.model_runner
        if get_parallel().tp_rank == 0:
            context = target.model_config.context_len
            ring = None if self._window is None else self._window.ring_slots(context)
            pools.tell(target, drafter, block=self.speculative_num_draft_tokens, ring=ring)
        self._graphs = WidthGraphs(target, drafter, self.draft_parallel_layout)
        if self._widths is not None and get_disagg().disaggregation_mode != "prefill":  # which decodes nothing
            self._adapt(self._widths)

    def _adapt(self, config: WidthConfig) -> None:
        """Choose widths as ``config`` says, with costs measured here: rank 0's, on every rank."""
        max_width = self.width_policy.max_width
        config = replace(config, widths=self._graphs.build(config.widths_for(max_width)))
        self._additional_graph_memory_usage = self._graphs.memory_gb
        self._additional_graph_time_usage = self._graphs.seconds
        widths, costs = config.widths, None
        self._ragged = config.ragged is not False and torch.device(self._target_worker.device).type == "cpu"
        self._draft_worker.model_runner.model.rates_drafts = self._ragged
        if config.policy == "adaptive":
            target, drafter = self._target_worker.model_runner, self._draft_worker.model_runner
            calibration = Calibration(
                target, drafter, self.draft_parallel_layout, self.drafter_config.mask_token_id, self._graphs
            )
            points = calibration.points(widths, target.max_running_requests)
            cuts = calibration.cuts(points) if self._ragged else {}
            points, cuts = get_parallel().tp_group.broadcast_object((points, cuts))
            costs = CostTable.calibrated(points, widths, cuts=cuts)
        self.width_policy = build_policy(replace(config, ragged=self._ragged and config.ragged), max_width, costs)
        if get_parallel().tp_rank == 0:
            blocks = "requests cut by confidence" if self._ragged else "whole blocks verified"
            logger.info("DFLASH: policy %s, widths %s, %s; %s", config.policy, widths, blocks, costs or "no cost table")

    # --- the step

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: GrammarBarrier | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run one prefill or decode step of a ``ScheduleBatch``.

        Args:
            on_publish: takes the new committed lengths as soon as they are known (overlap scheduling); the
                scheduler prepares the next step while the rest of this one runs.
            grammar_barrier: commits the last step's tokens to the grammars.
            pp_proxy_tensors: unused; DFLASH runs on one pipeline stage.
        """
        publish: Publish = on_publish or (lambda new_seq_lens: None)
        with torch.inference_mode():  # a small operator costs the host less there than under no_grad
            if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
                return self._prefill(batch, publish, grammar_barrier)
            if batch.forward_mode.is_idle():
                return self._idle(batch, publish)
            return self._decode(batch, publish, grammar_barrier)

    def _prefill(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: GrammarBarrier | None
    ) -> GenerationBatchResult:
        self._steps.interrupted([req.rid for req in batch.reqs], sum(batch.extend_lens))
        self._wait_for_fused_hicache_load(batch)
        if batch.has_grammar and batch.decoding_reqs and grammar_barrier is not None:
            grammar_barrier()  # a mixed batch samples after blocks that the grammars may not have seen yet
        self._accept.before_prefill(batch)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        self._accept.after_prefill(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        publish(result.new_seq_lens)
        hidden, plan = result.logits_output.hidden_states, result.kv_loc_plan
        result.logits_output.hidden_states = result.kv_loc_plan = None
        self._inject.prefill(batch, hidden, plan)
        result.next_draft_input = DraftState(result.next_token_ids, batch.seq_lens)
        return result

    def take_up(self, batch: ScheduleBatch) -> None:
        """Take up requests that another server prefilled: their K/V are here, the drafter's too."""
        self._accept.before_prefill(batch)
        if self._rings is not None:
            self._rings.take_up(batch)
        batch.spec_info = DraftState.transferred(batch.spec_info)

    def _decode(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: GrammarBarrier | None
    ) -> GenerationBatchResult:
        context = sum(batch.spec_info.committed_cpu)
        width = self.width_policy.width(batch.batch_size(), context)
        record = StepRecord(width, [req.rid for req in batch.reqs], context)
        self._steps.started(record)
        # Grammars and custom logit processors run on the host, so the host waits for the drafts there.
        on_host = self._ragged or batch.has_grammar or batch.sampling_info.has_custom_logit_processor
        stage = self._stages
        with self._graphs.at(width), nullcontext() if on_host else self._no_sync():
            with stage("draft"):
                step = self._lay_out(batch, width, grammar_barrier)
                if width > 1:
                    record.caught_up = self._inject.catch_up()
                self._draft(step)
                if self._ragged:
                    size = batch.batch_size()
                    cut(step, self.width_policy.cut(size), self.width_policy.least_cut(size))
                    record.verify_lens = step.verify_lens
            with stage("verify"):
                self._accept.before_verify(step)
                self._verify(step)
            with stage("accept"):
                self._accept(step)
            with stage("commit"):
                self._commit(step)
                publish(step.accepted.new_seq_lens)
        with stage("inject"):
            self._inject(step)
        return step.result(counted=self._widths is not None)

    def _idle(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        self._steps.interrupted()
        state = DraftState.idle(batch.seq_lens.device)
        publish(state.new_seq_lens)
        return GenerationBatchResult(
            next_token_ids=state.bonus_tokens,
            accept_lens=state.bonus_tokens.int(),
            new_seq_lens=state.new_seq_lens,
            next_draft_input=state,
            speculative_num_draft_tokens=self.width_policy.max_width,
        )
