"""Parse command lines with SGLang's parser in a fresh process, first without and then with its plugins loaded.

Command lines in, outcomes out, as JSON: ``{"plain": [[argument, ...], ...], "plugins": [...]}``. A last outcome is that
of old keywords of ``sglang.Engine``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

from sglang.srt.entrypoints.engine import Engine
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


def fields(args: Any) -> dict[str, Any]:
    return {name: getattr(args, name) for name in FIELDS}


def outcome(argv: list[str]) -> dict[str, Any]:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parsed = prepare_server_args(argv)
    except SystemExit as stopped:
        return {"exit": stopped.code, "error": stderr.getvalue().strip().splitlines()[-1]}
    return fields(parsed)


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        outcomes = {"plain": [outcome(argv) for argv in commands["plain"]]}
        load_plugins()
        outcomes["plugins"] = [outcome(argv) for argv in commands["plugins"]]
        old = Engine.server_args_class(
            model_path="x",
            mamba_scheduler_strategy="extra_buffer",
            speculative_dflash_draft_window_size=64,
            cuda_graph_backend_prefill="tc_piecewise",
        )
    json.dump({**outcomes, "engine": fields(old)}, sys.stdout)
