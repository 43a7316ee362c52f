"""Prefill/decode disaggregation: requests that another server prefilled begin to decode here.

The drafter's context K/V travel, not the target's hidden states: the prefilling server has computed them anyway, they
are the smaller of the two, and nothing is left to compute on arrival.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dflash.plan import serving

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch


def take_up_transferred(batch: ScheduleBatch | None, scheduler: Any, *_: Any) -> None:
    """Hook after ``SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch``: requests whose K/V have arrived."""
    if batch is not None and serving.plan is not None:
        scheduler.draft_worker.take_up(batch)


def send_rings(_: None, kv_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after ``setup_state_kv_args``, which describes what lies beside the K/V pages."""
    if serving.plan is not None:
        from sglang_dflash.worker.start.transfer import describe_rings

        describe_rings(kv_args)
