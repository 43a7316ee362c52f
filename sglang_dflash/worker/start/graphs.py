"""CUDA graphs and attention backends for every width of a step.

SGLang builds one of each, as attributes of its runners. A step replaces them by those of its width.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import build_attention_backends
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel, get_spec
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.utils.common import get_available_gpu_memory

from sglang_dflash.launch.division import FLOOR
from sglang_dflash.launch.launch import OUR_BACKEND
from sglang_dflash.upstream.hooks import Hooks

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Source of a verify's width in eager mode. In CUDA graphs every backend has one fixed width.
WIDTH_OF_THE_BATCH = frozenset({"flashinfer", "triton", "torch_dflash", OUR_BACKEND})
WIDTH_OF_THE_SERVER = frozenset({"fa3", "fa4", "trtllm_mha"})  # the last one in its XQA mask, on sm_90 and sm_120
FLOOR_GB = FLOOR / (1 << 30)  # SGLang's "GB"
DRAFTER_GB = 1.0  # below this SGLang's own worker captures no graphs of the drafter
Change = tuple[Any, str, Any]  # object, name of an attribute, its value at a width


class PlainDecodeGraphs(DecodeCudaGraphRunner):
    """Graphs of width 1: plain decoding with captured hidden states."""

    def capture(self) -> None:
        self.capture_forward_mode, self.capture_hidden_mode = ForwardMode.DECODE, CaptureHiddenMode.FULL
        super().capture()

    def get_spec_info(self, num_tokens: int) -> None:
        return None


def sizes_for_narrower(captured: Sequence[int]) -> list[int]:
    """Return the batch sizes to capture for narrower widths; other batches are padded.

    Of the server's ascending sizes: the smallest that hold 1, 2, 4, 8, 16, 24, 32, 48, ..., and the largest.
    """
    largest = captured[-1]
    steps = {factor << exponent for exponent in range(largest.bit_length()) for factor in (1, 3)} - {3, 6, 12}
    return sorted({min(size for size in captured if size >= step) for step in steps if step <= largest} | {largest})


class WidthGraphs:
    def __init__(self, target: ModelRunner, drafter: ModelRunner | None, layout: Any, drafter_width: int) -> None:
        self.target, self.drafter, self.layout = target, drafter, layout
        self._runners = [runner for runner in (target, drafter) if runner is not None]
        self._full, self.drafter_width = get_spec().speculative_num_draft_tokens, drafter_width
        self._captured = isinstance(target.decode_cuda_graph_runner, DecodeCudaGraphRunner)
        self._sizes = sizes_for_narrower(target.decode_cuda_graph_runner.capture_bs) if self._captured else []
        self._changes: dict[int, list[Change]] = {}
        self.memory_gb: defaultdict[str, float] = defaultdict(float)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def build(self, widths: Sequence[int]) -> tuple[int, ...]:
        """Build the resources of ``widths``: width 1 first, then from the widest down.

        Returns the widths of steps, ascending, equal on all ranks, without those that lack memory.
        """
        narrower = sorted({width for width in widths if width < self._full}, key=lambda width: (width > 1, -width))
        if narrower and (reason := reason_for_full_width_only(self.target, self._runners)):
            _log("width %d only: %s", self._full, reason)
            return (self._full,)
        for done, width in enumerate(narrower):
            if self._captured and not self._has_room():
                _log(
                    "widths %s are not used: their graphs would leave less than %.1f GB free. Fix: lower "
                    "--mem-fraction-static or --cuda-graph-max-bs-decode",
                    *(sorted(narrower[done:]), FLOOR_GB),
                )
                narrower = narrower[:done]
                break
            self._build_width(width)
        return tuple(sorted({*narrower, *(width for width in widths if width >= self._full)})) or (self._full,)

    @contextmanager
    def at(self, width: int) -> Iterator[None]:
        """Run forwards and commits inside this context with blocks of ``width`` positions."""
        changes = tuple(self._changes.get(width, ()))
        before = [getattr(owner, name) for owner, name, _ in changes]
        for owner, name, value in changes:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for (owner, name, _), value in zip(changes, before, strict=True):
                setattr(owner, name, value)

    def _build_width(self, width: int) -> None:
        self._changes[width] = []
        if not self._captured and not backends(self._runners) & WIDTH_OF_THE_SERVER:
            self._see_whole_window(width, self.target.attn_backend)
            return
        with get_spec().override(speculative_num_draft_tokens=width):
            self._build_runner(self.target, width, "decode" if width == 1 else "target_verify")
            # wider blocks use the graphs of the drafter's width
            if self.drafter is not None and 1 < width < self.drafter_width:
                with drafters_ranks(self.layout):
                    self._build_runner(self.drafter, width, "draft_decode")

    def _build_runner(self, runner: ModelRunner, width: int, phase: str) -> None:
        start, free = time.perf_counter(), free_gb(self.target)
        backend = build_attention_backends(model_runner=runner).attn_backend
        runner.kv_index_translator.bind_and_verify_backends([backend])
        self._changes[width].append((runner, "attn_backend", backend))
        self._see_whole_window(width, backend)
        if not self._captured:
            return
        graphs, graph = runner._decode_cuda_graph_runner_cls() if width > 1 else PlainDecodeGraphs, get_exec().graph
        config = with_phase(graph.cuda_graph_config, Phase.DECODE, bs=self._sizes)
        with shared_indices(backend, runner.attn_backend), self.at(width), graph.override(cuda_graph_config=config):
            self._changes[width].append((runner, "decode_cuda_graph_runner", graphs(runner)))
        seconds, memory_gb = time.perf_counter() - start, free - free_gb(self.target)
        self.seconds[phase] += seconds
        self.memory_gb[phase] += memory_gb
        _log("graphs of width %d, %s: %.0f MiB, %.1f s", width, phase, memory_gb * 1024, seconds)

    def _see_whole_window(self, width: int, backend: Any) -> None:
        # SGLang's Triton decode omits the oldest token of a sliding window, which its verify and the model read
        # (sgl-project/sglang#32087)
        if width == 1 and isinstance(backend, TritonAttnBackend) and backend.sliding_window_size:
            self._changes[width].append((backend, "sliding_window_size", backend.sliding_window_size + 1))

    def _has_room(self) -> bool:
        # narrower graphs take no more memory; rank 0 decides
        phases = "target_verify", "draft_decode"
        used = zip(self._runners, phases, strict=False)
        needed = sum(runner.graph_memory_usage.get(phase, 0.0) for runner, phase in used)
        return bool(get_parallel().tp_group.broadcast_object(free_gb(self.target) - needed >= FLOOR_GB))


@contextmanager
def shared_indices(backend: Any, widest: Any) -> Iterator[None]:
    """Capture graphs that list K/V slots in the buffer of the widest ones: one graph runs at a time.

    FlashInfer and Triton allocate ``requests * width * context`` of them per backend, and FlashInfer a mask that no
    block uses. With a sliding window they hold a second list.
    """
    full, own = (getattr(each, "full_attn_backend", each) for each in (backend, widest))  # a hybrid wraps it
    held, allocate = getattr(own, "cuda_graph_kv_indices", None), full.init_cuda_graph_state
    held = held[0] if isinstance(held, list) and len(held) == 1 else held
    if isinstance(held, torch.Tensor) and not getattr(own, "sliding_window_size", None):
        full.init_cuda_graph_state = partial(allocate, kv_indices_buf=held)
    yield
    if hasattr(full, "cuda_graph_custom_mask"):
        full.cuda_graph_custom_mask = None


def reach_past_the_context(original: Callable[..., Any], *, model_runner: ModelRunner) -> Any:
    """Hook around ``build_attention_backends``: the last block of a request may end past the context, never committed.

    SGLang's slot table has columns for it, and the page tables of fa3, fa4, trtllm_mha and of latent attention do not.
    """
    config, width = model_runner.model_config, get_spec().speculative_num_draft_tokens
    past = 0 if backends([model_runner]) <= WIDTH_OF_THE_BATCH else width
    config.context_len += past
    try:
        return original(model_runner=model_runner)
    finally:
        config.context_len -= past


_BUILT = "model_executor.model_runner_components.attention_backend_setup.build_attention_backends"
HOOKS = Hooks(around={_BUILT: reach_past_the_context})


def _log(text: str, *values: Any) -> None:
    if get_parallel().tp_rank == 0:
        logger.info("DFLASH: " + text, *values)


@contextmanager
def drafters_ranks(layout: Any) -> Iterator[None]:
    """Build SGLang's resources for the ranks that share the drafter.

    With ``attn_dp_enabled`` a graph runner would require the other groups' requests
    (``decode_graph_gather_requirements``).
    """
    with draft_pp_context(), draft_tp_context(layout), get_parallel().override(attn_dp_enabled=False):
        yield


def drafter_has_room(drafter: ModelRunner) -> bool:
    """Return whether the drafter's graphs fit; equal on all ranks."""
    if torch.device(drafter.device).type != "cuda" or (free := free_gb(drafter)) >= DRAFTER_GB:
        return True
    if get_parallel().tp_rank == 0:
        logger.warning(
            "DFLASH: the drafter runs without CUDA graphs, which need up to %.1f GB; %.2f GB of memory are free. "
            "Fix: lower --mem-fraction-static or --cuda-graph-max-bs-decode",
            *(DRAFTER_GB, free),
        )
    return False


def free_gb(runner: ModelRunner) -> float:
    """Return the free memory of the rank with the least, in SGLang's GB."""
    ranks = get_parallel()
    group = ranks.tp_group.cpu_group
    return float(get_available_gpu_memory(runner.device, runner.gpu_id, distributed=ranks.tp_size > 1, cpu_group=group))


def backends(runners: Sequence[ModelRunner]) -> set[str]:
    prefill = {runner.prefill_attention_backend_str for runner in runners}
    return prefill | {runner.decode_attention_backend_str for runner in runners}


def reason_for_full_width_only(target: ModelRunner, runners: Sequence[ModelRunner]) -> str | None:
    unknown = backends(runners) - WIDTH_OF_THE_BATCH - WIDTH_OF_THE_SERVER
    if unknown:
        return f"attention backend {', '.join(sorted(unknown))} may not support other widths"
    if get_exec().overlap.enable_two_batch_overlap:
        return "--enable-two-batch-overlap wraps the attention backend"
    if get_disagg().enable_pdmux:
        return "--enable-pdmux uses separate attention backends"
    if target.lora_manager is not None:
        return "LoRA's batch layout has one width"
    return None
