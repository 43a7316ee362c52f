"""Hooks that add our figures to SGLang's reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash.launch.plan import decision_of
from sglang_dflash.upstream.hooks import Hooks
from sglang_dflash.upstream.names import get_spec

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


SERVER_INFO_KEY = "sglang_dflash"


def report_worker(result: Any, scheduler: Scheduler, *_: Any) -> Any:
    """Hook after ``Scheduler.get_internal_state``: add our worker's plan and counters to ``/server_info``."""
    result.internal_state[SERVER_INFO_KEY] = scheduler.draft_worker.server_info()
    # SGLang's mean omits the steps since the last log interval: count every step since /flush_cache
    reporter = scheduler.metrics_reporter
    if blocks := reporter.spec_total_num_forward_ct + reporter.spec_num_forward_ct:
        tokens = reporter.spec_total_num_accept_tokens + reporter.spec_num_accept_tokens
        result.internal_state["avg_spec_accept_length"] = tokens / blocks
    return result


def count_verified_drafts(_: None, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Hook after ``TokenizerManager._calculate_spec_decoding_metrics``: count the drafts that were verified.

    SGLang counts the full width; ``cap_lens`` has the verified positions, anchors included.
    """
    if "spec_cap_length" not in meta_info:
        return
    drafts = recv_obj.spec_num_cap_tokens[i] - recv_obj.spec_verify_ct[i]
    meta_info["spec_num_proposed_drafts"] = drafts
    meta_info["spec_accept_rate"] = recv_obj.spec_num_correct_drafts[i] / drafts if drafts else 0.0


def report_mean_width(original: Callable[..., None], reporter: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around ``SchedulerMetricsReporter.report_decode_stats``: compute its accept rate from the mean width."""
    steps, verified = reporter.spec_num_forward_ct, reporter.spec_num_cap_tokens
    if not steps or verified <= steps:
        original(reporter, *args, **kwargs)
        return
    with get_spec().override(speculative_num_draft_tokens=verified / steps):
        original(reporter, *args, **kwargs)


def report_adaptive(resolved: dict[str, Any], server_args: Any) -> dict[str, Any]:
    """Hook after ``ServerArgs.resolved_dict``: report our adaptive width in ``/server_info``."""
    plan = decision_of(server_args).plan
    if plan is not None and plan.widths is not None:
        resolved["speculative_adaptive"] = True
    return resolved


HOOKS = Hooks(after={"managers.scheduler.Scheduler.get_internal_state": report_worker})
_ADAPTIVE = {"server_args.ServerArgs.resolved_dict": report_adaptive}
WIDTH_HOOKS = Hooks(
    around={
        "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats": report_mean_width
    },
    after=_ADAPTIVE,
)
TOKENIZER_HOOKS = Hooks(
    after={
        "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": count_verified_drafts,
        **_ADAPTIVE,
    }
)
