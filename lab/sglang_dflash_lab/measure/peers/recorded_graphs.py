"""SGLang's CUDA-graph runners on the CPU platform, whose graphs return what an eager forward of their shape returned.

The host does what it does before and after a replay on a GPU, but for attention plans.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from sglang_dflash.launch.plan import Decision
from sglang_dflash.launch.settings import ONE_FORWARD_SWITCH

Exclude = Callable[..., Any]  # calls a function without counting its time
_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph"


def allow_graphs() -> None:
    """Let this process resolve arguments with graphs of decode steps."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    from sglang_dflash_cpu import arguments

    def of_decodes(server_args: Any, cfg: Any) -> Any:
        config = with_phase(cfg.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
        return with_phase(config, Phase.DECODE, backend=Backend.FULL)

    arguments._without_graphs = of_decodes


def install(exclude: Exclude) -> None:
    """Replace captures and replays in a scheduler's process."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.platforms.interface import PlatformCapabilities
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash.worker import worker
    from sglang_dflash_cpu.platform import DFlashCpuPlatform

    platform: Any = DFlashCpuPlatform
    platform.capabilities = PlatformCapabilities(graph_capture=True)
    platform.get_graph_runner_cls = lambda _: lambda runner: runner._decode_cuda_graph_runner_cls()(runner)
    platform.get_full_graph_backend_cls = lambda _: lambda runner, **options: _Recorded(runner, exclude)
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    DecodeCudaGraphRunner.capture = lambda runner: runner.capture_prepare(runner.max_bs)  # chooses what is captured
    HookRegistry.register(_SETUP, _past_the_device, HookType.AROUND)
    for backend in (AttentionBackend, *_subclasses(AttentionBackend)):
        backend.init_cuda_graph_state = lambda *args, **kwargs: None
        backend.init_forward_metadata_out_graph = lambda *args, **kwargs: None
        backend.get_cuda_graph_seq_len_fill_value = lambda backend: 1
        if "init_forward_metadata" in vars(backend):
            backend.init_forward_metadata = _excluded(exclude, backend.init_forward_metadata)
    if os.environ.get(ONE_FORWARD_SWITCH) == "1":  # the plan has it only with the drafter's attention of a GPU
        module: Any = worker
        read = module.decision_of
        module.decision_of = lambda arguments: Decision(replace(read(arguments).plan, one_forward=True))


def _past_the_device(capture: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """To SGLang the device "cpu" has graphs only if it compiles."""
    from sglang.srt.runtime_context import get_flags

    flags = get_flags().capture
    flags.enable_torch_compile = True
    try:
        return capture(*args, **kwargs)
    finally:
        flags.enable_torch_compile = False


def _subclasses(base: Any) -> Iterator[Any]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def _excluded(exclude: Exclude, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: exclude(function, *args, **kwargs)


class _Recorded:
    """In place of ``FullCudaGraphBackend``."""

    def __init__(self, runner: Any, exclude: Exclude) -> None:
        self._runner, self._exclude, self._outputs = runner, exclude, dict[Any, Any]()

    def can_run(self, forward_batch: Any, key: Any) -> bool:
        return True

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, key: Any, forward_batch: Any) -> Any:
        return self._exclude(self._replay, key, forward_batch)

    def _replay(self, key: Any, forward_batch: Any) -> Any:
        if key not in self._outputs:
            self._outputs[key] = self._drafts(key.size) if forward_batch is None else self._eager(forward_batch)
        output = self._outputs[key]
        if (rows := output.next_token_logits) is not None:  # the worker writes into its logits
            output = replace(output, next_token_logits=rows.clone())
        return output

    def _eager(self, forward_batch: Any) -> Any:
        runner, graphs = self._runner.model_runner, self._runner.model_runner.decode_cuda_graph_runner
        runner.decode_cuda_graph_runner = None
        try:
            output = runner.forward(forward_batch).logits_output
        finally:
            runner.decode_cuda_graph_runner = graphs
        for hook in runner.capture_tail_hooks if runner.is_draft_worker else ():  # SGLang's worker samples drafts in it
            hook(self._runner, output, forward_batch, len(forward_batch.input_ids))
        return output

    def _drafts(self, size: int) -> Any:
        from sglang_dflash.model.drafter import DraftOutput

        drafts = torch.zeros(size, self._runner.captured_req_width - 1, dtype=torch.int64)
        margins = drafts.float() if self._runner.model_runner.model._returns_margins else None
        return DraftOutput(None, drafts=drafts, margins=margins, broken=drafts[:, 0])
