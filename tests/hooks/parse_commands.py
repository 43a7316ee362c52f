"""Parse command lines with SGLang's own parser in a fresh process: JSON lists in, outcomes out.

Run as ``python parse_commands.py plain|plugin``; plugins load before parsing, as in SGLang's launchers.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

FIELDS = (
    "mamba_radix_cache_strategy",
    "speculative_draft_window_size",
    "cuda_graph_backend_prefill",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "mem_fraction_static",
)


def outcome(argv: list[str]) -> dict[str, Any]:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parsed = prepare_server_args(argv)
    except SystemExit as stopped:
        return {"exit": stopped.code, "error": stderr.getvalue().strip().splitlines()[-1]}
    return {name: getattr(parsed, name) for name in FIELDS}


def engine_outcome() -> dict[str, Any]:
    """An engine's arguments from the old keywords."""
    from sglang.srt.entrypoints.engine import Engine

    load_plugins()
    old = {"mamba_scheduler_strategy": "extra_buffer", "cuda_graph_backend_prefill": "tc_piecewise"}
    parsed = Engine.server_args_class(model_path="x", speculative_dflash_draft_window_size=64, **old)
    return {name: getattr(parsed, name) for name in FIELDS}


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        engine = [engine_outcome()] if sys.argv[1] == "plugin" else []
        outcomes = [outcome(argv) for argv in commands] + engine
    json.dump(outcomes, sys.stdout)
