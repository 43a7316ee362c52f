"""``--speculative-algorithm DFLASH`` means our worker, unless something says that SGLang's own must serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_dflash import upstream
from sglang_dflash.cpu import is_active as on_our_cpu_platform
from sglang_dflash.drafter.kinds import foreign_kind
from sglang_dflash.errors import DFlashError

logger = logging.getLogger(__name__)

SWITCH = "SGLANG_DFLASH"


def choose_worker(original: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """Around ``SpeculativeAlgorithm.create_worker``: our worker class for DFLASH, SGLang's for the rest.

    Raises:
        DFlashError: the CPU platform is asked for something that only SGLang's own worker serves, on a GPU.
    """
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    if builtin_requested():
        logger.warning("%s=builtin: DFLASH is served by SGLang's own worker, not by sglang-dflash", SWITCH)
        return original(algorithm, server_args)
    if reason := reason_for_builtin(server_args):
        refuse_on_cpu(reason)
        logger.warning("sglang-dflash leaves DFLASH to SGLang's own worker: %s", reason)
        return original(algorithm, server_args)
    return our_worker()


def refuse_on_cpu(reason: str) -> None:
    """On the CPU platform nobody else can serve what our worker leaves to SGLang's.

    Raises:
        DFlashError: this process serves on the CPU platform.
    """
    if on_our_cpu_platform():
        raise DFlashError(
            f"{reason}, on the CPU platform",
            expected="a plain DFlash drafter without this option",
            remedy="serve this pair on a GPU, where SGLang's own worker takes it",
        )


def builtin_requested() -> bool:
    """Whether the user asked for SGLang's own worker.

    Raises:
        DFlashError: the switch holds an unknown word.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "builtin"):
        raise DFlashError(f"{SWITCH}={value!r}", expected="builtin, or unset", remedy=f"unset {SWITCH}")
    return value == "builtin"


def reason_for_builtin(server_args: Any) -> str | None:
    """Why SGLang's own worker must serve, in words for the log; None where ours can."""
    from sglang_dflash.drafter.served import published_config

    config = upstream.resolving_view(server_args)
    path, revision = config.speculative_draft_model_path, config.speculative_draft_model_revision
    if kind := foreign_kind(published_config(path, revision)):
        return f"the drafter is of the kind {kind}"
    if not config.device.startswith("cuda") and not on_our_cpu_platform():
        return f"the device is {config.device}"
    for used, feature in (
        (config.attn_dp_size > 1, "DP attention"),
        (config.attn_cp_size > 1, "context parallelism"),
        (config.disaggregation_mode != "null", "prefill/decode disaggregation"),
        (config.enable_watermark, "--enable-watermark"),
        (config.speculative_accept_threshold_single != 1.0, "--speculative-accept-threshold-single (not lossless)"),
        (config.speculative_accept_threshold_acc != 1.0, "--speculative-accept-threshold-acc (not lossless)"),
    ):
        if used:
            return f"{feature} is used"
    return None


def our_worker() -> type:
    """Our worker class, with our drafter in the registry that its model loader asks."""
    from sglang_dflash.model.drafter import DFlashDraftModel
    from sglang_dflash.worker.worker import DFlashWorker

    upstream.check_version()
    upstream.ModelRegistry.models[DFlashDraftModel.__name__] = DFlashDraftModel
    return DFlashWorker
