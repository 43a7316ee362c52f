"""``--speculative-algorithm DFLASH`` means our worker, unless something says that SGLang's own must serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash import upstream
from sglang_dflash.cpu import is_active as on_our_cpu_platform
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.kinds import kind_left_to_builtin
from sglang_dflash.drafter.served import note_our_worker
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang_dflash.upstream import ServerArgs, SpeculativeAlgorithm

logger = logging.getLogger(__name__)

SWITCH = "SGLANG_DFLASH"


def choose_worker(original: Callable[..., type], algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type:
    """Around ``SpeculativeAlgorithm.create_worker``: our worker class for DFLASH, SGLang's for the rest.

    Raises:
        DFlashError: as :func:`reason_for_builtin`.
    """
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    reason = reason_for_builtin(server_args)
    note_our_worker(reason is None)
    if reason is None:
        return our_worker()
    logger.warning("DFLASH is served by SGLang's own worker, not by sglang-dflash: %s", reason)
    return original(algorithm, server_args)


def builtin_requested() -> bool:
    """Whether the user asked for SGLang's own worker.

    Raises:
        DFlashError: the switch holds an unknown word.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "builtin"):
        raise DFlashError(f"{SWITCH}={value!r}", expected="builtin, or unset", remedy=f"unset {SWITCH}")
    return value == "builtin"


def reason_for_builtin(server_args: ServerArgs) -> str | None:
    """Why SGLang's own worker must serve DFLASH, in words for the log; None if ours does.

    Raises:
        DFlashError: the switch holds an unknown word, DP attention is asked for, or ours cannot serve on the CPU
            platform, which has no other.
    """
    if builtin_requested():
        return f"{SWITCH}=builtin"
    args = upstream.resolving_view(server_args)
    reason = _not_ours(args)
    if reason is None:
        _refuse_dp_attention(args)
    elif on_our_cpu_platform():
        raise DFlashError(
            f"{reason}, on the CPU platform",
            expected="a plain DFlash drafter without this option",
            remedy="serve this pair on a GPU, where SGLang's own worker takes it",
        )
    return reason


def _refuse_dp_attention(args: Any) -> None:
    """Refuse what our worker does not run, on a GPU too, instead of stepping aside in silence.

    Raises:
        DFlashError: the ranks would attend to different requests.
    """
    if args.attn_dp_size <= 1:
        return
    builtin = "" if on_our_cpu_platform() else f"{SWITCH}=builtin for SGLang's own worker, or "
    raise DFlashError(
        f"DP attention over {args.attn_dp_size} groups of ranks",
        expected="ranks that serve one batch (--tp-size), or replicas (--dp-size without --enable-dp-attention)",
        remedy=f"{builtin}leave --enable-dp-attention out",
    )


def _not_ours(args: Any) -> str | None:
    files = ModelFiles(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    reasons = (
        (kind := kind_left_to_builtin(files.config), f"the drafter is of the kind {kind}"),
        (not args.device.startswith("cuda") and not on_our_cpu_platform(), f"the device is {args.device}"),
        (args.attn_cp_size > 1, "context parallelism is used"),
        (args.enable_watermark, "--enable-watermark is used"),
        (args.speculative_accept_threshold_single != 1.0, "--speculative-accept-threshold-single is not lossless"),
        (args.speculative_accept_threshold_acc != 1.0, "--speculative-accept-threshold-acc is not lossless"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def our_worker() -> type:
    """Our worker class, with our drafter in the registry that its model loader asks."""
    from sglang_dflash.model.drafter import DFlashDraftModel
    from sglang_dflash.worker.worker import DFlashWorker

    upstream.check_version()
    upstream.ModelRegistry.models[DFlashDraftModel.__name__] = DFlashDraftModel
    return DFlashWorker
