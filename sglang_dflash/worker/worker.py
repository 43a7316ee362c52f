"""The DFLASH worker: SGLang's scheduler calls it for every prefill and decode step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING
from sglang_dflash.drafter.tensors import load_mask_embedding
from sglang_dflash.features import ranks
from sglang_dflash.features.copies import Copies
from sglang_dflash.features.exact import row_dependent_products
from sglang_dflash.features.hidden import for_clients, keep_last_layer
from sglang_dflash.features.payoff import Payoff, known_causes
from sglang_dflash.features.pools import log_pools
from sglang_dflash.features.ranks import Load, Rounds
from sglang_dflash.features.telemetry import EVERY, Observer, allocated_bytes, identity
from sglang_dflash.features.window import DraftRings, allocate_rings, prepare_transfer
from sglang_dflash.model.drafter import DFlashDraftModel
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.plan.serving import current, the_plan
from sglang_dflash.plan.settings import EXACT_SWITCH, slots_per_request
from sglang_dflash.upstream.worker import (
    BaseSpecWorker,
    CaptureHiddenMode,
    DecodeCudaGraphRunner,
    GenerationBatchResult,
    build_draft_tp_worker,
    draft_pp_context,
    draft_tp_context,
    get_parallel,
    get_server_args,
    get_spec,
    resolve_draft_parallel_layout,
)
from sglang_dflash.width import WidthPolicy
from sglang_dflash.worker.accept import Accept
from sglang_dflash.worker.commit import RecurrentCommit
from sglang_dflash.worker.debug import stage, sync_guard
from sglang_dflash.worker.flight import StepRecord, StepTimer, on_host
from sglang_dflash.worker.forwards import Draft, Inject, NoDrafter, Verify
from sglang_dflash.worker.start import seconds, since_start, timed
from sglang_dflash.worker.start.calibration import width_policy
from sglang_dflash.worker.start.checks import check_replay
from sglang_dflash.worker.start.graphs import WidthGraphs, drafter_has_room, drafters_ranks
from sglang_dflash.worker.start.prewarm import CONTEXT, FirstCalls, dummy_batch, prewarm_largest_step
from sglang_dflash.worker.state import DraftState, RequestRows
from sglang_dflash.worker.step import GrammarBarrier, Layout, Publish, Step, idle_result

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import ModelRunner, Req, ScheduleBatch, ServerArgs, TpModelWorker

logger = logging.getLogger(__name__)


class DFlashWorker(BaseSpecWorker):
    """Drafts a block with a drafter or by copies, verifies it with the target and commits the accepted tokens.

    A block is the anchor, which is the last committed token, followed by drafts; its width counts both. Between draft
    and publish nothing synchronises.

    Raises:
        DFlashError: the drafter's tensors are unusable, or do not fit the target.
    """

    speculative_num_steps = 1

    # built with the pools
    _commit: RecurrentCommit
    _layout: Layout
    _draft: Draft | NoDrafter
    _verify: Verify
    _accept: Accept
    _inject: Inject | NoDrafter
    _rings: DraftRings | None
    _copies: Copies | None
    _rows: list[RequestRows]
    _timer: StepTimer
    _observer: Observer

    @timed("drafter")
    def __init__(self, *, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self._target_worker, self.plan = target_worker, the_plan()
        current.worker = self
        self._is_first = get_parallel().attn_tp_rank == 0
        layout = resolve_draft_parallel_layout(DFlashDraftModel.draft_parallel_spec, collapse_cp=True)
        self.draft_parallel_layout = layout
        self._target: ModelRunner = target_worker.model_runner
        self._draft_worker: TpModelWorker | None = None
        self._drafter: ModelRunner | None = None
        mask_embedding = None
        if self.plan.drafts:
            with draft_pp_context(), draft_tp_context(layout):
                self._draft_worker = build_draft_tp_worker(
                    server_args=server_args,
                    gpu_id=gpu_id,
                    nccl_port=nccl_port,
                    target_model_config=self._target.model_config,
                    algo_label="DFLASH",
                ).draft_worker
            self._drafter = self._draft_worker.model_runner
            mask_embedding = load_mask_embedding(self.plan.files.path(MASK_EMBEDDING), self.plan.drafter)
        self._vocabulary = TargetVocabulary.of(self._target.model, self.plan.drafter, mask_embedding)
        if self._drafter is not None:
            self._drafter.model.set_vocabulary(self._vocabulary)
        self.width_policy = WidthPolicy(self.plan.block)
        self._at_width: Callable[[int], AbstractContextManager[Any]] = nullcontext
        self._rounds: Rounds | None = None
        self._in_flight: deque[StepRecord] = deque()
        self._no_sync = sync_guard(self._target.device)
        self.identity = identity(self.plan, self._target, self._drafter)
        if self._is_first:
            names = (self.identity[key] for key in ("version", "target", "drafter", "dtype"))
            logger.info("sglang-dflash %s serves DFLASH: %s + %s in %s", *(name or "copies alone" for name in names))

    # --- read by the scheduler

    @property
    def model_runner(self) -> ModelRunner:
        """The drafter's runner, else the target's; SGLang saves its weights with ``save_remote_model``."""
        return self._drafter or self._target

    @property
    def speculative_num_draft_tokens(self) -> int:
        return self.plan.block

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return tuple(runner.attn_backend for runner in (self._target, self._drafter) if runner is not None)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [] if self._drafter is None else [("draft", self._drafter)]

    def server_info(self) -> dict[str, Any]:
        memory = allocated_bytes(self._target, self._drafter)
        memory["history"] = 0 if self._copies is None else self._copies.history.nbytes
        observed, width = self._observer.info(self.width_policy), self.width_policy.describe()
        choice = None if self._copies is None else self._copies.evidence.as_dict()
        return {**self.identity, **observed, "copy_choice": choice, "width": width, "memory_bytes": memory}

    def weights_updated(self, role: str, version: str | None) -> None:
        """Called after an update of ``"target"`` or ``"draft"``, which invalidates learned acceptance."""
        self.width_policy.forget()
        if self._copies is not None:
            self._copies.forget()
        self._observer.weights_updated(role, version)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Called in launch order once a step's accept counts are on the host."""
        record = self._in_flight.popleft()
        record.accept_lens = [n + 1 for n in num_correct_drafts_per_req]
        if self._copies is not None:
            self._copies.read(record)
        timed = self._timer.finished()
        self._observer.count(record, timed, self.width_policy)
        if self._rounds is not None:
            self._rounds.finished(record, timed)
        else:
            self.width_policy.observe(record.width, record.accept_lens, record.buckets)
        if get_parallel().tp_size == 1:  # times differ between ranks, which must choose the same widths
            for each in timed:
                assert each.milliseconds is not None
                self.width_policy.observe_time(each.batch_size, each.width, each.milliseconds, at_most=each.caught_up)
        record.requests = ()

    # --- start-up, in call order

    @timed("pools")
    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        plan, target, drafter = self.plan, self._target, self._draft_worker
        with draft_tp_context(self.draft_parallel_layout):
            self._rings = None
            if plan.window is None or drafter is None:
                super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
            else:
                self._rings = allocate_rings(plan, target, drafter, memory_pool_config, req_to_token_pool)
        self._build()
        if self._drafter is not None:
            prepare_transfer(plan.role, token_to_kv_pool_allocator, self._drafter.token_to_kv_pool, self._rings)

    def _build(self) -> None:
        plan, layout, rings, drafter = self.plan, self.draft_parallel_layout, self._rings, self._drafter
        self._commit = RecurrentCommit(self._target_worker, replays=plan.replay, exact=plan.exact)
        self._layout = Layout(self._target, plan.drafter.mask_token_id, self._commit.state_table)
        self._accept = Accept(self._target_worker, self._vocabulary)
        if drafter is None:
            self._draft = self._inject = NoDrafter(self._target.device)
        else:
            defers = plan.role != "decode" and not get_server_args().enable_hierarchical_cache
            self._draft = Draft(drafter, layout, rings, plan.drafted, self._accept.seeds)
            self._inject = Inject(drafter, layout, rings, defers=defers)
        self._verify = Verify(self._target_worker)
        keep_last_layer(self._target)
        self._copies = Copies(self._target, plan.block) if plan.copies else None
        self._rows = [rows for rows in (self._accept, self._rings, self._copies) if rows is not None]
        payoff = None
        if self._is_first and drafter is not None:
            payoff = Payoff(known_causes(plan, self._target, drafter))
        self._observer = Observer(plan.block, self._draft.broken, payoff)
        self._timer = StepTimer(self._target.device, every=1 if plan.widths is not None else EVERY)

    def _draft_model_runners(self) -> tuple[Any, ...]:
        """Runners that share the target's KV slots; none under a draft window."""
        return () if self._rings is not None else super()._draft_model_runners()

    def init_attention_backends(self) -> None:
        with self._drafters_context():
            super().init_attention_backends()
        plan = self.plan
        if plan.exact and (found := row_dependent_products(self._target, plan.served_widths)):
            self.identity["exact"] = f"products depend on the number of rows: {', '.join(map(str, found))}"
            logger.warning("DFLASH: a verify is not exact, so text may differ at near-ties: %s", self.identity["exact"])
        elif plan.exact:
            logger.info("DFLASH: greedy output is bit-identical to plain decoding (%s=0 disables it)", EXACT_SWITCH)
        if plan.replay and not plan.exact and plan.role != "prefill":  # before the target's graphs are captured
            check_replay(self._target, plan.block)

    @contextmanager
    def _drafters_context(self) -> Iterator[None]:
        """Build SGLang resources for the drafter, at the drafter's width."""
        width = get_spec().override(speculative_num_draft_tokens=self.plan.drafted)
        with drafters_ranks(self.draft_parallel_layout), width:
            yield

    def init_cuda_graphs(self) -> None:
        plan, target, drafter = self.plan, self._target, self._drafter
        if self._draft_worker is not None and drafter is not None and isinstance(self._inject, Inject):
            # outside the context, because it is collective over all ranks; a prefill server drafts nothing
            has_room = plan.role != "prefill" and drafter_has_room(drafter)
            with self._drafters_context(), timed("drafter's graphs"):
                self._inject.stage(plan.drafted)
                self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=has_room)
                if not isinstance(drafter.decode_cuda_graph_runner, DecodeCudaGraphRunner):
                    drafter.model.staged = None  # an eager forward launches as much itself
        if self._is_first:
            self.identity["requests"] = log_pools(plan, target, slots_per_request(get_server_args()))
        widths = self.width_policy.widths
        if plan.widths is not None and plan.role != "prefill":
            graphs = WidthGraphs(target, drafter, self.draft_parallel_layout, plan.drafted)
            with timed("graphs of widths"):
                widths = graphs.build(plan.served_widths)
            self._at_width = graphs.at
            self._additional_graph_memory_usage = graphs.memory_gb
            self._additional_graph_time_usage = graphs.seconds
        FirstCalls(plan, target, self._inject, self.dummy_step).run(widths, self._at_width)
        self.width_policy = width_policy(plan, widths, target, self.dummy_step)  # once kernels are compiled
        if get_parallel().attn_dp_enabled and plan.widths is not None:
            self._rounds = Rounds(self.width_policy, plan.block, self._buckets)
        ranks.join(self._rounds)
        self._inject.catch_up()
        if self._is_first:
            self.identity["start_seconds"] = {**seconds, "process": round(since_start(), 2)}
            logger.info("DFLASH: seconds of the start by part: %s", self.identity["start_seconds"])

    def dummy_step(self, bs: int, width: int, context: int = CONTEXT) -> None:
        """Run a step of ``bs`` dummy requests, which no telemetry counts."""
        batch = dummy_batch(self._target, bs, context)
        with torch.inference_mode():
            step = self._run(batch, StepRecord(width, bs, tuple(batch.reqs)), lambda new_seq_lens: None, None)
            self._inject.inject(step)

    def prewarm_sampling(self) -> Any:
        on_cuda = torch.device(self._target.device).type == "cuda"
        return prewarm_largest_step(self._target, self.plan.block) if on_cuda else super().prewarm_sampling()

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
            on_publish: receives the new committed lengths as soon as they are computed (overlap scheduling).
            grammar_barrier: commits the last step's tokens to the grammars.
        """
        publish: Publish = on_publish or (lambda new_seq_lens: None)
        with torch.inference_mode():  # costs the host less per operator than no_grad
            if batch.forward_mode.is_idle():
                return self._idle(batch, publish)
            if batch.forward_mode.is_extend():
                return self._prefill(batch, publish, grammar_barrier)
            return self._decode(batch, publish, grammar_barrier)

    def _idle(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        self._timer.interrupted()
        if batch.is_extend_in_batch:
            self._target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        else:
            width = self._choose_width(batch).width
            with self._at_width(width):
                self._verify.idle(batch, width)
        result = idle_result(batch, self.plan.block)
        publish(result.new_seq_lens)
        return result

    def _prefill(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: GrammarBarrier | None
    ) -> GenerationBatchResult:
        self._timer.interrupted()
        self._wait_for_fused_hicache_load(batch)
        if batch.has_grammar and batch.decoding_reqs and grammar_barrier is not None:
            grammar_barrier()  # a mixed batch samples after blocks that the grammars may still lack
        for rows in self._rows:
            rows.start(batch)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        self._accept.synchronise(result.next_token_ids)
        for rows in self._rows:
            rows.begin(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        publish(result.new_seq_lens)
        output, hidden, plan = result.logits_output, result.logits_output.hidden_states, result.kv_loc_plan
        output.hidden_states, result.kv_loc_plan = for_clients(batch, output), None
        if hidden is not None:
            self._inject.prefill(batch, hidden, plan)
        else:  # scores at chosen positions; a hit of this prefix would draft without context
            for req in batch.reqs:
                req.skip_radix_cache_insert = True
        result.next_draft_input = DraftState(result.next_token_ids, batch.seq_lens, self.plan.block)
        return result

    def start_transferred(self, batch: ScheduleBatch) -> None:
        """Start requests that another server prefilled."""
        stock = batch.spec_info
        batch.spec_info = DraftState(stock.bonus_tokens, stock.new_seq_lens, self.plan.block, stock.future_indices)
        for rows in self._rows:
            rows.transferred(batch)

    def _decode(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: GrammarBarrier | None
    ) -> GenerationBatchResult:
        record = self._choose_width(batch)
        self._in_flight.append(record)
        self._timer.started(record)
        self._observer.started(record)
        # they run on the host, which waits for the drafts
        on_host = batch.has_grammar or batch.sampling_info.has_custom_logit_processor
        with nullcontext() if on_host else self._no_sync():
            step = self._run(batch, record, publish, grammar_barrier)
        with stage("inject"):
            self._inject.inject(step)
        return step.result(counted=self.plan.widths is not None)

    def _choose_width(self, batch: ScheduleBatch) -> StepRecord:
        """Idle ranks choose too, so that the policies stay equal."""
        buckets = self._buckets(batch.reqs)
        load = Load.of(batch, buckets) if self._rounds is None else self._rounds.load
        return StepRecord(self.width_policy.width(*load), load.batch_size, tuple(batch.reqs), buckets)

    def _buckets(self, reqs: Sequence[Req]) -> list[int]:
        return [] if self._copies is None else self._copies.buckets(reqs)

    def _run(
        self, batch: ScheduleBatch, record: StepRecord, publish: Publish, grammar_barrier: GrammarBarrier | None
    ) -> Step:
        width = record.width
        with self._at_width(width):
            with stage("draft"):
                step = self._layout.lay_out(batch, width, grammar_barrier)
                if width > 1:
                    record.caught_up = self._inject.before_draft(step, min(width, self.plan.drafted))
                self._draft.draft(step)
                if self._copies is not None and width > 1:
                    self._copies.offer(step)
            with stage("verify"):
                self._accept.before_verify(step)
                self._commit.before_verify(step)
                self._verify.verify(step)
            with stage("accept"):
                self._accept.accept(step)
            with stage("commit"):
                self._commit.commit(step)
                publish(step.accepted.new_seq_lens)
                for rows in self._rows:
                    rows.commit(step)
            if self._copies is not None:
                record.rows, record.found = batch.req_pool_indices_cpu.numpy().tolist(), on_host(self._copies.found)
        return step
