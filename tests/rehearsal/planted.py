"""Bugs to plant in a rehearsed server, in what our worker passes to SGLang's attention backends."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

PLANTED = "REHEARSE_PLANTED"


def install() -> None:
    if name := os.environ.get(PLANTED):
        module: Any = importlib.import_module("sglang_dflash.worker.layout")
        BUGS[name](module)


def _short_for_the_drafter(layout: Any) -> None:
    """One token of context too few."""
    _change_blocks(layout, lambda kv: replace(kv, seq_lens=kv.seq_lens - 1), drafters=True)


def _stale_on_the_host(layout: Any) -> None:
    """The host's lengths lack the block."""
    _change_blocks(layout, lambda kv: replace(kv, host_lens=kv.host_lens - kv.width), drafters=False)


def _change_blocks(layout: Any, change: Callable[[Any], Any], *, drafters: bool) -> None:
    call = layout.ForwardBatches.__call__

    def changed(self: Any, step: Any, kv: Any) -> Any:
        return call(self, step, change(kv) if self._runner.is_draft_worker is drafters else kv)

    layout.ForwardBatches.__call__ = changed


def _tables_of_another_width(layout: Any) -> None:
    """Backends of narrower widths are built for the widest."""
    graphs: Any = importlib.import_module("sglang_dflash.worker.start.graphs")
    spec = graphs.get_spec

    class Unchanged:
        def __getattr__(self, name: str) -> Any:
            return (lambda **_: nullcontext()) if name == "override" else getattr(spec(), name)

    graphs.get_spec = Unchanged


def _tables_end_with_the_context(layout: Any) -> None:
    """As SGLang sizes them."""
    graphs: Any = importlib.import_module("sglang_dflash.worker.start.graphs")
    graphs.WIDTH_OF_THE_BATCH |= graphs.WIDTH_OF_THE_SERVER


def _tails_of_parts_of_pages(layout: Any) -> None:
    plan: Any = importlib.import_module("sglang_dflash.launch.plan")
    whole = plan.DraftWindow.tail_slots
    plan.DraftWindow.tail_slots = lambda self, context: whole(self, context) and whole(self, context) + 1


BUGS = {
    "a length one short for the drafter": _short_for_the_drafter,
    "a stale length on the host": _stale_on_the_host,
    "page tables of another width": _tables_of_another_width,
    "page tables that end with the context": _tables_end_with_the_context,
    "tails of parts of pages": _tails_of_parts_of_pages,
}
