"""Recurrent states (gated delta net): reasons against a replay, their dtype, and snapshots."""

import math
from collections.abc import Iterator

from sglang_dflash.errors import Finding, builtin, error, first_true, note, ok
from sglang_dflash.launch.launch import Launch

_RECORDS_FLAG = "--linear-replayssm-cache-len"
_RECORDS = 16  # SGLang's default
_RAGGED_VERIFY = "SGLANG_RAGGED_VERIFY_MODE"
_REPLAYING_BACKENDS = ("triton", "flashinfer")
_MIN_RING = 16  # SGLang's kernels multiply tiles of at least 16
_CHUNK = 64  # tokens of SGLang's GDN kernels
CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"


def why_not_replayed(launch: Launch) -> str | None:
    """Return why the recurrent states of a target cannot be replayed, or None.

    Sources: SGLang's ``handle_linear_attn_backend``, and ``unified_memory_pool.py``, which allocates no records.
    """
    settings = launch.settings
    backend, ragged = settings.decode_backend, settings.variable(_RAGGED_VERIFY)
    if settings.disaggregation_mode == "prefill":  # it verifies nothing, unless it becomes a decoding server
        switches = settings.enable_pd_role_switch
        return "a prefill server with --enable-pd-role-switch allocates no records" if switches else None
    return first_true({
        f"the linear-attention backend is {backend}": backend not in _REPLAYING_BACKENDS,
        "--enable-linear-replayssm keeps separate records": settings.enable_linear_replayssm,
        "--enable-unified-memory allocates no records": settings.enable_unified_memory,
        f"{_RAGGED_VERIFY}={ragged}": ragged not in ("", "static"),
    })  # fmt: skip


def replays(launch: Launch) -> bool:
    """Return whether a server replays recurrent states; a prefill server verifies nothing."""
    return launch.hybrid and launch.settings.disaggregation_mode != "prefill"


def resumes_retracted(launch: Launch) -> bool:
    """Return whether a retracted request resumes with the recurrent state that the step in flight has advanced.

    A retraction drops the step in flight, and SGLang saves the state that this step advanced.
    """
    backup = launch.settings.disaggregation_decode_retraction_backup
    return launch.hybrid and launch.settings.disaggregation_mode == "decode" and backup != "none"


def check_states(launch: Launch) -> Iterator[Finding]:
    if launch.other_states:
        yield builtin("the target has recurrent states that are not those of gated delta nets")
    if launch.hybrid and (reason := why_not_replayed(launch)):
        yield builtin(f"recurrent states cannot be replayed: {reason}")
    if resumes_retracted(launch) and not launch.settings.disable_overlap_schedule:
        problem = "replayed, without overlap: a retracted request would resume with a state ahead of its tokens"
        yield note(problem, remedy="none needed")
    if replays(launch):
        yield ok("replayed")


def check_records(launch: Launch) -> Iterator[Finding]:
    """Check the length of the replay records, which SGLang does not."""
    chosen, needed = int(launch.settings.linear_replayssm_cache_len), ring_length(launch.block)
    if replays(launch) and chosen != _RECORDS and (chosen < needed or chosen & (chosen - 1)):
        yield error(
            f"{_RECORDS_FLAG} {chosen} is no power of two from {needed}, which blocks of {launch.block} need",
            remedy=f"leave {_RECORDS_FLAG} out",
        )


def record_length(launch: Launch) -> int:
    """Return the positions of a request's replay records; SGLang's default value counts as unset."""
    chosen = int(launch.settings.linear_replayssm_cache_len)
    return ring_length(launch.block) if chosen == _RECORDS else chosen


def ring_length(block: int) -> int:
    """Return the smallest power of two that holds a block of ``block`` tokens.

    A ring of this length is full after every verify, so every commit updates the state.
    """
    return max(_MIN_RING, 1 << (block - 1).bit_length())


def needs_bfloat16_states(launch: Launch) -> bool:
    """Return whether FlashInfer's kernels serve the recurrent states, whose dtype the user left to SGLang."""
    settings, is_blackwell = launch.settings, (launch.device.capability or (0, 0))[0] >= 10
    backends = settings.decode_backend, settings.linear_attn_verify_backend
    return is_blackwell and settings.mamba_ssm_dtype is None and "flashinfer" in backends


def state_dtype(launch: Launch) -> str:
    """Return the dtype of recurrent states in plain decoding, as ``mamba2_state_dtype`` chooses it."""
    if needs_bfloat16_states(launch):
        return "bfloat16"
    chosen = launch.settings.mamba_ssm_dtype or launch.settings.variable("SGLANG_MAMBA_SSM_DTYPE")
    return chosen or launch.text.get("mamba_ssm_dtype") or "float32"


def snapshot_grid(launch: Launch) -> int:
    """Return the tokens between two snapshots of a decoding request, SGLang's ``mamba_track_grid``."""
    settings, chunk = launch.settings, launch.text.get("mamba_chunk_size") or _CHUNK
    return math.lcm(max(chunk, settings.page), settings.mamba_track_interval or 1)


def check_snapshots(launch: Launch) -> Iterator[Finding]:
    """With overlap, SGLang launches a step before it has read where the step in flight stored its snapshot."""
    settings, block, interval = launch.settings, launch.block, launch.settings.mamba_track_interval
    caches = not settings.disable_radix_cache and settings.mamba_radix_cache_strategy != "no_buffer"
    if not (launch.hybrid and caches) or interval is None:
        return
    grid, blocks = snapshot_grid(launch), 1 if settings.disable_overlap_schedule else 2
    if interval < block or grid < blocks * block:
        yield error(
            f"--mamba-track-interval {interval} takes snapshots every {grid} tokens, and the block size is {block}: "
            "the prefix cache would keep wrong states",
            remedy=f"set --mamba-track-interval to {blocks * block} or more; 256 is SGLang's default",
        )
