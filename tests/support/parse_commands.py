"""What SGLang makes of command lines with its plugins: its parser, and the resolution of a server.

Importing SGLang takes long, so one fresh process takes all of them, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any

FIELDS = (
    "mamba_radix_cache_strategy",
    "speculative_draft_window_size",
    "cuda_graph_backend_prefill",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "mem_fraction_static",
)


def outcomes(commands: Sequence[Sequence[str]], *, resolve: bool) -> list[dict[str, Any]]:
    """Return the arguments in :data:`FIELDS`, or an ``error``, of each command line: parsed, or resolved too."""
    asked = {"commands": commands, "resolve": resolve}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    done = subprocess.run([sys.executable, "-m", __name__], input=json.dumps(asked), check=False, **options)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def outcome(argv: list[str], *, resolve: bool) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parsed = prepare_server_args(argv)
            if resolve:
                parsed.resolve_once()
    except SystemExit:
        return {"error": stderr.getvalue()}
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        return {"error": traceback.format_exception_only(error)[-1]}
    return {name: getattr(parsed, name) for name in FIELDS}


def main() -> None:
    from sglang.srt.plugins import load_plugins

    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        load_plugins()
        found = [outcome(argv, resolve=asked["resolve"]) for argv in asked["commands"]]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
