"""The DFLASH worker: SGLang's scheduler calls it for every prefill and decode step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel, get_server_args, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch.profiler import record_function

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING
from sglang_dflash.drafter.tensors import load_mask_embedding
from sglang_dflash.features.copies import Copies
from sglang_dflash.features.exact.rows import is_exact
from sglang_dflash.features.exact.stepped import SteppedCommit
from sglang_dflash.features.feature import Feature
from sglang_dflash.features.figures import Figures
from sglang_dflash.features.hidden import for_clients, return_last_layer
from sglang_dflash.features.payoff import Payoff, known_causes
from sglang_dflash.features.pool_sizes import log_pools
from sglang_dflash.features.ranks import SharedWidth
from sglang_dflash.features.step_width import Width
from sglang_dflash.features.telemetry import EVERY, Telemetry, identity
from sglang_dflash.features.transfer import back_up_drafter
from sglang_dflash.features.window import DraftRings, allocate_rings
from sglang_dflash.launch.plan import current, decision_of
from sglang_dflash.launch.settings import slots_per_request
from sglang_dflash.model.drafter import DFlashDraftModel
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.states.commit import RecurrentCommit
from sglang_dflash.step.draft_state import DraftState
from sglang_dflash.step.flight import Flight
from sglang_dflash.step.step import GrammarBarrier, Publish, Step, idle_result
from sglang_dflash.upstream import hooks
from sglang_dflash.width import WidthPolicy
from sglang_dflash.worker.accept import Accept
from sglang_dflash.worker.draft_graphs import DraftGraphs
from sglang_dflash.worker.forwards import Draft, Inject, NoDrafter, Verify
from sglang_dflash.worker.layout import Layout
from sglang_dflash.worker.start import seconds, since_start, timed
from sglang_dflash.worker.start.calibration import width_policy
from sglang_dflash.worker.start.checks import check_replay
from sglang_dflash.worker.start.graphs import WidthGraphs, drafter_has_room, drafters_ranks
from sglang_dflash.worker.start.prewarm import CONTEXT, FirstCalls, dummy_batch, prewarm_largest_step

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)
_NO_RANGE: AbstractContextManager[None] = nullcontext()


def stage(name: str) -> AbstractContextManager[Any]:
    """Return a stage's profiler range; without a profiler it would cost several small operators."""
    return record_function(f"dflash.{name}") if torch.autograd._profiler_enabled() else _NO_RANGE


class DFlashWorker(BaseSpecWorker):
    """Drafts a block with a drafter or by copies, verifies it with the target and commits the accepted tokens.

    A block is the anchor, which is the last committed token, followed by drafts; its width counts both. Between draft
    and publish nothing synchronises.

    Raises:
        DFlashError: the drafter's tensors are unusable, or do not fit the target.
    """

    speculative_num_steps = 1

    # built with the pools
    rings: DraftRings | None
    width: Width
    _states: RecurrentCommit
    _layout: Layout
    _draft: Draft | NoDrafter
    _verify: Verify
    _accept: Accept
    _inject: Inject | NoDrafter
    _features: list[Feature]
    _flight: Flight

    @timed("drafter")
    def __init__(self, *, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        plan = decision_of(server_args).plan
        assert plan is not None
        current.worker, self.plan, self._target_worker = self, plan, target_worker
        self._is_first = get_parallel().attn_tp_rank == 0
        ranks = resolve_draft_parallel_layout(DFlashDraftModel.draft_parallel_spec, collapse_cp=True)
        self.draft_parallel_layout = ranks
        self._target: ModelRunner = target_worker.model_runner
        self._draft_worker: TpModelWorker | None = None
        self.drafter: ModelRunner | None = None
        mask_embedding = None
        if self.plan.has_drafter:
            with draft_pp_context(), draft_tp_context(ranks):
                self._draft_worker = build_draft_tp_worker(
                    server_args=server_args,
                    gpu_id=gpu_id,
                    nccl_port=nccl_port,
                    target_model_config=self._target.model_config,
                    algo_label="DFLASH",
                ).draft_worker
            self.drafter = self._draft_worker.model_runner
            mask_embedding = load_mask_embedding(self.plan.files.path(MASK_EMBEDDING), self.plan.drafter)
        self._vocabulary = TargetVocabulary.of(self._target.model, self.plan.drafter, mask_embedding)
        if self.drafter is not None:
            self.drafter.model.set_vocabulary(self._vocabulary)
        self.identity = identity(self.plan, self._target, self.drafter)
        if self._is_first:
            names = (self.identity[key] for key in ("version", "target", "drafter", "dtype"))
            logger.info("sglang-dflash %s serves DFLASH: %s + %s in %s", *(name or "copies alone" for name in names))

    # --- read by the scheduler

    @property
    def model_runner(self) -> ModelRunner:
        """The drafter's runner, else the target's; SGLang saves its weights with ``save_remote_model``."""
        return self.drafter or self._target

    @property
    def speculative_num_draft_tokens(self) -> int:
        return self.plan.block

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return tuple(runner.attn_backend for runner in (self._target, self.drafter) if runner is not None)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [] if self.drafter is None else [("draft", self.drafter)]

    def server_info(self) -> dict[str, Any]:
        info = {**self.identity, "hooks": hooks.installed()}
        for feature in self._features:
            info |= feature.info()
        return info

    def weights_updated(self, role: str, version: str | None) -> None:
        """Called after an update of ``"target"`` or ``"draft"``, which invalidates observed accept lengths."""
        for feature in self._features:
            feature.forget(role, version)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Called in launch order once a step's accept counts are on the host."""
        finished, collected = self._flight.finish([n + 1 for n in num_correct_drafts_per_req])
        for feature, its in zip(self._features, collected, strict=True):
            feature.read(finished, its)

    # --- start-up, in call order

    @timed("pools")
    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        plan, drafter, self.rings = self.plan, self._draft_worker, None
        with draft_tp_context(self.draft_parallel_layout):
            if plan.window is None or drafter is None:
                super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
            else:
                self.rings = allocate_rings(plan, self._target, drafter, memory_pool_config, req_to_token_pool)
        self._build_stages()
        self._build_features()
        if plan.role == "decode" and self.drafter is not None:
            back_up_drafter(token_to_kv_pool_allocator, self.drafter.token_to_kv_pool, self.rings)

    def _build_stages(self) -> None:
        plan, ranks, drafter = self.plan, self.draft_parallel_layout, self.drafter
        commit = SteppedCommit if plan.exact else RecurrentCommit
        self._states = commit(self._target_worker)
        self._layout = Layout(self._target, plan.drafter.mask_token_id, self._states.state_table)
        self._accept = Accept(self._target_worker, self._vocabulary)
        if drafter is None:
            self._draft = self._inject = NoDrafter(self._target.device)
        else:
            defers = plan.role != "decode" and not get_server_args().enable_hierarchical_cache
            self._inject = Inject(drafter, ranks, self.rings, defers=defers)
            self._draft = Draft(drafter, ranks, self.rings, self._inject, self._accept.seeds, plan.drafter_width)
        self._verify = Verify(self._target_worker)
        return_last_layer(self._target)
        self._flight = Flight(self._target.device, every=1 if plan.widths is not None else EVERY)

    def _build_features(self) -> None:
        """Build the features in the order of their calls: copies change drafts, and the others read them."""
        plan, figures, accept, payoff = self.plan, Figures(self.plan.block), self._accept, None
        copies = [Copies(self._target, plan.block, figures)] if plan.copies else []
        policy, buckets = WidthPolicy(plan.block), copies[0].buckets if copies else lambda reqs: []
        shared = plan.groups > 1 and plan.widths is not None
        self.width = (SharedWidth if shared else Width)(policy, buckets)
        if self._is_first and self.drafter is not None:
            payoff = Payoff(known_causes(plan, self._target, self.drafter))
        telemetry = Telemetry(self.width, self._draft.broken, figures, payoff)
        self._features = [*copies, accept.seeds, accept.penalties, accept.processors]
        self._features += [telemetry, self.width, *([] if self.rings is None else [self.rings])]

    def _draft_model_runners(self) -> tuple[Any, ...]:
        """Runners that share the target's KV slots; none under a draft window."""
        return () if self.rings is not None else super()._draft_model_runners()

    def init_attention_backends(self) -> None:
        with self._drafters_context():
            super().init_attention_backends()
        plan = self.plan
        if plan.exact:
            self.identity["exact"] = is_exact(self._target, plan.served_widths)
        elif plan.replay:  # before the target's graphs are captured
            check_replay(self._target, plan.block)

    @contextmanager
    def _drafters_context(self) -> Iterator[None]:
        """Build SGLang resources for the drafter, at the drafter's width."""
        width = get_spec().override(speculative_num_draft_tokens=self.plan.drafter_width)
        with drafters_ranks(self.draft_parallel_layout), width:
            yield

    def init_cuda_graphs(self) -> None:
        plan, target, drafter = self.plan, self._target, self.drafter
        if self._draft_worker is not None and drafter is not None and isinstance(self._inject, Inject):
            # outside the context, as it is collective over all ranks; a prefill server drafts nothing
            has_room = plan.role != "prefill" and drafter_has_room(drafter)
            with self._drafters_context(), timed("drafter's graphs"):
                self._inject.allocate(plan.drafter_width)
                if plan.one_forward:
                    drafter._decode_cuda_graph_runner_cls = lambda: DraftGraphs
                self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=has_room)
                if not isinstance(drafter.decode_cuda_graph_runner, DecodeCudaGraphRunner):
                    drafter.model.staged = None  # an eager drafter gains nothing from a queue
        if self._is_first:
            self.identity["requests"] = log_pools(plan, target, slots_per_request(get_server_args()))
        widths = plan.served_widths
        if plan.widths is not None and plan.role != "prefill":
            graphs = WidthGraphs(target, drafter, self.draft_parallel_layout, plan.drafter_width)
            with timed("graphs of widths"):
                widths = graphs.build(plan.served_widths)
            self.width.at = graphs.at
            self._additional_graph_memory_usage = graphs.memory_gb
            self._additional_graph_time_usage = graphs.seconds
        first_calls = FirstCalls(plan, target, self._inject, self.dummy_step, self._states.compiles_every_batch)
        first_calls.run(widths, self.width.at)
        self.width.policy = width_policy(plan, widths, target, self.dummy_step)  # once kernels are compiled
        if isinstance(self._inject, Inject):
            self._inject.catch_up()
        if self._is_first:
            self.identity["start_seconds"] = {**seconds, "process": round(since_start(), 2)}

    def dummy_step(self, bs: int, width: int, context: int = CONTEXT, sampled: bool = False) -> None:
        """Run a step of ``bs`` dummy requests, greedy or sampled. No telemetry counts it."""
        batch = dummy_batch(self._target, bs, context, sampled=sampled)
        with torch.inference_mode():
            self._inject.inject(self._run(batch, width, lambda new_seq_lens: None, None))

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
        with torch.inference_mode():  # costs less host time per operator than no_grad
            if batch.forward_mode.is_idle():
                return self._idle(batch, publish)
            if batch.forward_mode.is_extend():
                return self._prefill(batch, publish, grammar_barrier)
            return self._decode(batch, publish, grammar_barrier)

    def _idle(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        self._flight.interrupt()
        if batch.is_extend_in_batch:
            self._target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        else:
            width = self.width.pick(batch).width  # the policies of all ranks get equal calls
            with self.width.at(width):
                self._verify.idle(batch, width)
        result = idle_result(batch, self.plan.block)
        publish(result.new_seq_lens)
        return result

    def _prefill(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: GrammarBarrier | None
    ) -> GenerationBatchResult:
        self._flight.interrupt()
        self._wait_for_fused_hicache_load(batch)
        if batch.has_grammar and batch.decoding_reqs and grammar_barrier is not None:
            grammar_barrier()  # a mixed batch samples after blocks that the grammars may not have read
        for feature in self._features:
            feature.start(batch)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        self._accept.synchronise(result.next_token_ids)
        for feature in self._features:
            feature.begin(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        publish(result.new_seq_lens)
        output, hidden, slots = result.logits_output, result.logits_output.hidden_states, result.kv_loc_plan
        output.hidden_states, result.kv_loc_plan = for_clients(batch, output), None
        if hidden is not None:
            self._inject.prefill(batch, hidden, slots)
        else:  # a request for scores of given positions; a hit of its prefix would draft without context
            for req in batch.reqs:
                req.skip_radix_cache_insert = True
        result.next_draft_input = DraftState(result.next_token_ids, batch.seq_lens, self.plan.block)
        return result

    def start_transferred(self, batch: ScheduleBatch) -> None:
        """Start requests that another server prefilled."""
        stock = batch.spec_info
        batch.spec_info = DraftState(stock.bonus_tokens, stock.new_seq_lens, self.plan.block, stock.future_indices)
        for feature in self._features:
            feature.transferred(batch)

    def _decode(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: GrammarBarrier | None
    ) -> GenerationBatchResult:
        self._flight.begin()
        picked = self.width.pick(batch)
        step = self._run(batch, picked.width, publish, grammar_barrier)
        self._flight.launched(picked, step, [feature.collect(step) for feature in self._features])
        with stage("inject"):
            self._inject.inject(step)
        output = step.verified.logits_output
        output.hidden_states = for_clients(batch, output)  # the scheduler copies them to the host
        return step.result(counted=self.plan.widths is not None)

    def _run(self, batch: ScheduleBatch, width: int, publish: Publish, grammar_barrier: GrammarBarrier | None) -> Step:
        with self.width.at(width):
            with stage("draft"):
                step = self._layout.lay_out(batch, width, grammar_barrier)
                if self._draft.graphs_of(step) is not None:  # a plan fills memory that SGLang's runners share
                    self._verify.plan(step)
                self._draft.draft(step)
                for feature in self._features:
                    feature.after_draft(step)
                self._accept.prepare(step)
                self._states.prepare(step)
            with stage("verify"):
                self._verify.verify(step)
            with stage("accept"):
                self._accept.accept(step)
            with stage("commit"):
                self._states.advance(step)
                publish(step.accepted.new_seq_lens)
                for feature in self._features:
                    feature.commit(step)
        return step
