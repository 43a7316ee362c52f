"""Whether this server can run blocks narrower than its configured width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dflash.upstream import get_disagg, get_exec

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner

# Where SGLang 0.5.23's attention backends take a verify's width from in an eager forward. The buffers of a graph have
# one width in all of them.
WIDTH_OF_THE_BATCH = frozenset({"flashinfer", "triton", "trtllm_mha", "torch_dflash"})
WIDTH_OF_THE_SERVER = frozenset({"fa3", "fa4"})


def backends(*runners: ModelRunner) -> set[str]:
    """Names of their attention backends."""
    return {
        name
        for runner in runners
        for name in (runner.prefill_attention_backend_str, runner.decode_attention_backend_str)
    }


def reason_for_full_width_only(target: ModelRunner, drafter: ModelRunner) -> str | None:
    """Why every step must have the server's width; None if it need not."""
    linear = getattr(target.attn_backend, "linear_attn_backend", None)
    seeds_the_next = getattr(linear, "accept_lens_pool", None) is not None
    unknown = backends(target, drafter) - WIDTH_OF_THE_BATCH - WIDTH_OF_THE_SERVER
    reasons = {
        f"attention backend {', '.join(sorted(unknown))} is not known to take other widths": bool(unknown),
        "--enable-two-batch-overlap wraps the attention backend": get_exec().overlap.enable_two_batch_overlap,
        "--enable-pdmux has attention backends of its own": get_disagg().enable_pdmux,
        "LoRA's batch layout has one width": target.lora_manager is not None,
        "ReplaySSM keeps a history in a ring of blocks": _keeps_history(target),
        "the next block starts from a state in this block's scratch": seeds_the_next,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _keeps_history(target: ModelRunner) -> bool:
    """Whether plain decoding or KDA keeps a ring. GDN's records are folded at every commit (states/replay.py)."""
    pool: Any = getattr(target.req_to_token_pool, "mamba_pool", None)
    return pool is not None and bool(pool.enable_linear_replayssm or getattr(pool, "replayssm_is_kda", False))
