"""Resolve command lines as a server does before it starts a process: JSON lists in, the error of each out."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def refusal(argv: list[str]) -> str | None:
    """What stops the server: the parser's message, or the exception's last line; None where it would go on."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            prepare_server_args(argv).resolve_once()
    except SystemExit:
        return stderr.getvalue()
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        return traceback.format_exception_only(error)[-1]
    return None


if __name__ == "__main__":
    load_plugins()
    commands = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        refusals = [refusal(argv) for argv in commands]
    json.dump(refusals, sys.stdout)
