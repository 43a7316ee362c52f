"""Run the largest sampling step once at start-up, so that it runs out of memory there and not under load."""

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
    """Sample a full batch of blocks with every filter; SGLang's K/V pool leaves the returned peak memory free.

    If the step runs out of memory, warn, as SGLang's own worker does: fewer requests, or greedy requests, still fit.

    Args:
        runner: the target's; its graphs are captured.
        block: the server's block size.

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
        logger.info("DFLASH: sampling %d rows takes up to %s; %s were free before", rows, size(peak), size(free))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        _check_greedy(runner, rows, free)
        peak = sampling(rows, vocab)
        logger.warning(
            "DFLASH: %s of device memory are free, but %d requests that all sample in blocks of %d need %s; such a "
            "batch would stop the server. Fix: lower --mem-fraction-static or --max-running-requests",
            *(size(free), runner.max_running_requests, block, size(peak)),
        )
    result = SamplingPrewarmResult(sampling_input_bytes=inputs, sampling_headroom_bytes=peak)
    runner.sampling_prewarm_result = result
    return result


def _check_greedy(runner: ModelRunner, rows: int, free: int) -> None:
    vocab = runner.model_config.vocab_size
    # A graph has allocated its logits; without graphs a forward allocates them.
    allocated = 1 if runner.decode_cuda_graph_runner is not None else rows
    try:
        torch.zeros(allocated, vocab, dtype=torch.float32, device=runner.device).expand(rows, vocab).argmax(-1)
    except torch.OutOfMemoryError as error:
        raise DFlashError(
            f"{size(free)} of device memory are free, too little for {rows} rows of {vocab} logits",
            expected=f"memory for {runner.max_running_requests} greedy requests",
            remedy="lower --mem-fraction-static or --max-running-requests",
        ) from error


def sample(runner: ModelRunner, rows: int, *, seeded: bool) -> None:
    """Run the target's sampler over ``rows`` rows of zero logits, as a verify does, with top-k, top-p and min-p."""
    vocab, device = runner.model_config.vocab_size, runner.device

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    info: Any = SamplingBatchInfo(
        temperatures=full(1.0)[:, None],
        top_ps=full(0.95),
        top_ks=full(vocab, torch.int32),
        min_ps=full(0.01),
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
