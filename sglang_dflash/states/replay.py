"""The replay's two operations, and the verify in place of SGLang's kernel while our worker serves.

SGLang's records are rings: an unfolded history with cursors, and a margin that depends on the block's width. Ours are
folded into the state at every commit (:mod:`.commit`). A block's records therefore begin at position 0 at any width, no
cursor is read or moved, and nothing is left over for the ring's next owner to find.

Beta is rounded where plain decoding rounds it: in Triton's decode kernel, to the dtype of its input. FlashInfer's keeps
it in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.ops.dispatch import by_device
from sglang_dflash.plan import serving
from sglang_dflash.plan.replay import decode_backend
from sglang_dflash.states import reference
from sglang_dflash.states.reference import Records
from sglang_dflash.upstream import get_exec

_KERNELS = "sglang_dflash.states.kernels"

gdn_verify = by_device(reference.gdn_verify, f"{_KERNELS}.gdn_verify")
gdn_commit = by_device(reference.gdn_commit, f"{_KERNELS}.gdn_commit")


def verify(original: Callable[..., Any], **call: Any) -> Any:
    """Hook around ``gdn_replayssm_spec_decode``: once per GDN layer, keywords only."""
    if serving.plan is None:
        return original(**call)
    return gdn_verify(
        call["q"],
        call["k"],
        call["v"],
        call["a"],
        call["b"],
        call["A_log"],
        call["dt_bias"],
        call["checkpoint_state"],
        call["ssm_state_indices"],
        Records(*(call[f"{ring}_cache"] for ring in ("d", "k", "g", "rawv", "rawk"))),
        call["replay_indices"],
        width=call["max_spec_len"],
        scale=call["scale"],
        round_beta=decode_backend(get_exec().mamba) == "triton",
        out=call["out"],
    )


def pool_records(states: Any) -> Records:
    """The records of all layers in SGLang's ``SpeculativeState``."""
    rings = states.replayssm_d, states.replayssm_k, states.replayssm_g, states.replayssm_rawv, states.replayssm_rawk
    return Records(*rings)
