"""Rehearse the largest sampling step at the start: missing memory shows there first, and not under traffic."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.machine import size
from sglang_dflash.plan.pools import sampling
from sglang_dflash.upstream import LogitsProcessorOutput, SamplingBatchInfo, SamplingPrewarmResult
from sglang_dflash.worker.sampling.seeded import SeededRows

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner

logger = logging.getLogger(__name__)


def prewarm_largest_step(runner: ModelRunner, block: int) -> SamplingPrewarmResult:
    """Sample a full batch of blocks with every filter, and tell SGLang the peak, which its K/V pool then leaves free.

    If the memory that is left cannot hold it, the server starts with a warning, as SGLang's own worker does: fewer
    requests, or requests that do not sample, still fit.

    Args:
        runner: the target's; its graphs are captured.
        block: positions of the widest block.

    Raises:
        DFlashError: not even a full batch of greedy requests fits.
    """
    rows, vocab = runner.max_running_requests * block, runner.model_config.vocab_size
    inputs, free = rows * vocab * 4, torch.cuda.mem_get_info(runner.device)[0]
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    try:
        for seeded in (True, False):
            sample(runner, rows, seeded=seeded)
        torch.cuda.synchronize(runner.device)
        peak = torch.cuda.max_memory_allocated(runner.device) - before
        logger.info("DFLASH: sampling %d rows takes %s at its peak, %s free before", rows, size(peak), size(free))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        _choose_greedily(runner, rows, free)
        peak = sampling(rows, vocab)
        logger.warning(
            "DFLASH: %s of device memory are free, and %d requests that all sample in blocks of %d need %s: such a "
            "batch would end the server. Fix: lower --mem-fraction-static or --max-running-requests",
            *(size(free), runner.max_running_requests, block, size(peak)),
        )
    result = SamplingPrewarmResult(sampling_input_bytes=inputs, sampling_headroom_bytes=peak)
    runner.sampling_prewarm_result = result
    return result


def _choose_greedily(runner: ModelRunner, rows: int, free: int) -> None:
    vocab = runner.model_config.vocab_size
    # A graph owns the memory of its logits; without graphs a forward allocates them.
    own = 1 if runner.decode_cuda_graph_runner is not None else rows
    try:
        torch.zeros(own, vocab, dtype=torch.float32, device=runner.device).expand(rows, vocab).argmax(-1)
    except torch.OutOfMemoryError as error:
        raise DFlashError(
            f"{size(free)} of device memory are free for {rows} rows of {vocab} logits",
            expected=f"room for {runner.max_running_requests} greedy requests",
            remedy="lower --mem-fraction-static or --max-running-requests",
        ) from error


def sample(runner: ModelRunner, rows: int, *, seeded: bool) -> None:
    """Run the target's sampler once over made-up logits, as a verify does, with top-k, top-p and min-p."""
    vocab, device = runner.model_config.vocab_size, runner.device

    def every(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    info: Any = SamplingBatchInfo(
        temperatures=every(1.0)[:, None],
        top_ps=every(0.95),
        top_ks=every(vocab, torch.int32),
        min_ps=every(0.01),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=vocab,
        device=str(device),
    )
    numbers = torch.arange(rows, device=device)
    info.seeded_rows = SeededRows(numbers, numbers) if seeded else None
    logits = torch.zeros(rows, vocab, dtype=torch.float32, device=device)
    runner.sampler(LogitsProcessorOutput(next_token_logits=logits), info, False, [], [], numbers)
