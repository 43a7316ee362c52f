"""Prefill/decode disaggregation: requests that another server prefilled begin to decode here.

The drafter's context K/V travel, not the target's hidden states: the prefilling server has computed them anyway, they
are the smaller of the two, and nothing is left to compute on arrival.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.served import our_worker_serves
from sglang_dflash.upstream import declare_resolution, hybrid_gdn_config, model_config_of, resolving_view

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch, ServerArgs

logger = logging.getLogger(__name__)


def choose_schedule(server_args: ServerArgs) -> None:
    """Before SGLang resolves speculation, for a server of ours: no overlap where it would give wrong tokens.

    When a decoding server retracts a request, SGLang drops the step that is in flight and keeps the recurrent state
    that this step has advanced; the request would go on from tokens and a state that are a step apart. K/V are written
    again, a state is not.
    """
    args = resolving_view(server_args)
    resumes = args.disaggregation_mode == "decode" and args.disaggregation_decode_retraction_backup != "none"
    if not resumes or args.disable_overlap_schedule or hybrid_gdn_config(model_config_of(server_args)) is None:
        return
    declare_resolution(server_args, "sglang_dflash.disaggregation", disable_overlap_schedule=True)
    logger.warning(
        "DFLASH: no overlap scheduling on a decoding server of a hybrid target, whose retracted requests would come "
        "back with a state ahead of their tokens (--disaggregation-decode-retraction-backup none aborts them instead)"
    )


def take_up_transferred(batch: ScheduleBatch | None, scheduler: Any, *_: Any) -> None:
    """After ``SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch``: the requests whose K/V have arrived."""
    if batch is not None and our_worker_serves():
        scheduler.draft_worker.take_up(batch)


def send_rings(_: None, kv_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``setup_state_kv_args``, which describes what lies beside the K/V pages."""
    if our_worker_serves():
        from sglang_dflash.worker.transfer import describe_rings

        describe_rings(kv_args)
