"""Recurrent states (gated delta net): replayed or stored per draft token, their dtype, and snapshots."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sglang_dflash.errors import DFlashError, Finding, error
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.settings import REPLAY_SWITCH, Settings

_REQUEST, _RECORDS_FLAG = "--enable-linear-replayssm-spec", "--linear-replayssm-cache-len"
_RECORDS = 16  # SGLang's default
_RAGGED_VERIFY = "SGLANG_RAGGED_VERIFY_MODE"
_REPLAYING_BACKENDS = ("triton", "flashinfer")
_MIN_RING = 16  # SGLang's kernels multiply tiles of at least 16
_CHUNK, _MAMBA_CHUNK = 64, 256  # tokens of SGLang's GDN and Mamba2 kernels
CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"


def states_kept_by(settings: Settings) -> str | None:
    """Return why a recurrent state is stored per draft token, or None: states are replayed.

    Sources: SGLang's ``handle_linear_attn_backend``, and ``unified_memory_pool.py``, which allocates no records.

    Raises:
        DFlashError: a replay is requested too.
    """
    backend, ragged = settings.decode_backend, settings.variable(_RAGGED_VERIFY)
    reasons = {
        f"{REPLAY_SWITCH}=0": settings.variable(REPLAY_SWITCH) == "0",
        f"the linear-attention backend is {backend}": backend not in _REPLAYING_BACKENDS,
        "--enable-linear-replayssm keeps separate records": settings.enable_linear_replayssm,
        "--disaggregation-mode prefill: this server verifies nothing": settings.disaggregation_mode == "prefill",
        "--enable-unified-memory allocates no records": settings.enable_unified_memory,
        f"{_RAGGED_VERIFY}={ragged}": ragged not in ("", "static"),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason and (settings.enable_linear_replayssm_spec or settings.variable(REPLAY_SWITCH) == "1"):
        request = _REQUEST if settings.enable_linear_replayssm_spec else f"{REPLAY_SWITCH}=1"
        raise DFlashError(
            f"{request}, but {reason}",
            expected="a server that can replay recurrent states",
            remedy=f"leave {request} out: states are replayed wherever they can be",
        )
    return reason


def record_length(settings: Settings, block: int) -> int:
    """Return the positions of a request's replay records; DFlashError for too few, which SGLang does not check."""
    chosen, needed = int(settings.linear_replayssm_cache_len), ring_length(block)
    if chosen == _RECORDS:  # or the same value set by the user
        return needed
    if chosen < needed or chosen & (chosen - 1):
        raise DFlashError(
            f"{_RECORDS_FLAG} {chosen}",
            expected=f"a power of two, at least {needed} for blocks of {block}",
            remedy=f"leave {_RECORDS_FLAG} out",
        )
    return chosen


def ring_length(block: int) -> int:
    """Return the smallest power of two that holds a block of ``block`` tokens.

    Such a ring is full after every verify, so every commit updates the state.
    """
    return max(_MIN_RING, 1 << (block - 1).bit_length())


def flashinfer_states(settings: Settings, device: Device) -> str | None:
    """Return the flag that selects FlashInfer's kernels for recurrent states, which need bfloat16, or None."""
    if not device.is_blackwell:
        return None
    if settings.decode_backend == "flashinfer":
        return "--linear-attn-decode-backend" if settings.linear_attn_decode_backend else "--linear-attn-backend"
    return "--linear-attn-verify-backend" if settings.linear_attn_verify_backend == "flashinfer" else None


def needs_bfloat16_states(settings: Settings, device: Device) -> bool:
    return settings.mamba_ssm_dtype is None and flashinfer_states(settings, device) is not None


def state_dtype(settings: Settings, pair: Pair, device: Device) -> str:
    """Return the dtype of recurrent states in plain decoding, as ``mamba2_state_dtype`` chooses it."""
    if needs_bfloat16_states(settings, device):
        return "bfloat16"
    chosen = settings.mamba_ssm_dtype or settings.variable("SGLANG_MAMBA_SSM_DTYPE")
    return chosen or pair.text.get("mamba_ssm_dtype") or "float32"


def snapshot_grid(settings: Settings, pair: Pair) -> int:
    """Return the tokens between two snapshots of a decoding request, SGLang's ``mamba_track_grid``."""
    chunk = pair.text.get("mamba_chunk_size") or (pair.layers.mamba and pair.text.get("chunk_size", _MAMBA_CHUNK))
    return math.lcm(max(chunk or _CHUNK, settings.page), settings.mamba_track_interval or 1)


def check_snapshots(settings: Settings, pair: Pair) -> Iterator[Finding]:
    """With overlap, a step is launched before SGLang knows where the step in flight stored its snapshot."""
    block, interval = pair.block_size(settings), settings.mamba_track_interval
    caches = pair.recurrent and not settings.disable_radix_cache and settings.mamba_radix_cache_strategy != "no_buffer"
    if not caches or interval is None:
        return
    grid = snapshot_grid(settings, pair)
    blocks = 1 if settings.disable_overlap_schedule else 2
    if interval < block or grid < blocks * block:
        yield error(
            f"--mamba-track-interval {interval} takes snapshots every {grid} tokens, and the block size is {block}",
            expected=f"at most one snapshot in {blocks * block} tokens; the prefix cache would keep wrong states",
            remedy=f"set --mamba-track-interval to {blocks * block} or more; 256 is SGLang's default",
        )
