"""Which worker serves, said where a user and a test can see it: the log and ``/server_info``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash import __version__
from sglang_dflash.drafter.config import DrafterConfig

SERVER_INFO_KEY = "sglang_dflash"


def identity(
    config: DrafterConfig,
    *,
    target: str,
    drafter: str,
    max_width: int,
    window: int | None,
    draft_attention_backend: str,
) -> dict[str, Any]:
    """What the banner prints and ``/server_info`` shows."""
    return {
        "version": __version__,
        "target": target,
        "drafter": drafter,
        "block_size": max_width,
        "layers": list(config.layer_types),
        "causal": list(config.causal),
        "target_layer_ids": list(config.target_layer_ids),
        "window": window,
        "strategy": f"chain of argmax drafts, fixed width {max_width}",
        "draft_attention_backend": draft_attention_backend,
    }


def banner(identity: Mapping[str, Any]) -> str:
    """One line for the log."""
    return (
        f"sglang-dflash {identity['version']} serves DFLASH: target {identity['target']}, drafter "
        f"{identity['drafter']}, block {identity['block_size']}, layers {'/'.join(identity['layers'])}, "
        f"window {identity['window'] or 'none'}, {identity['strategy']}"
    )


def report_worker(result: Any, scheduler: Any, *_: Any) -> Any:
    """After ``Scheduler.get_internal_state``: add our worker's identity and counters under one key."""
    worker = scheduler.draft_worker
    if hasattr(type(worker), "server_info"):
        result.internal_state[SERVER_INFO_KEY] = worker.server_info()
    return result
