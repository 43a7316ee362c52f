"""Resolve one command line as a server does, on an SGLang that lacks two things; the last line printed is the error."""

from __future__ import annotations

import sys

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_dflash.upstream import SYMBOLS, Symbol

if __name__ == "__main__":
    load_plugins()
    SYMBOLS["gone"] = Symbol("sglang.srt.speculative.spec_utils.gone")
    SYMBOLS["ForwardMode"] = Symbol(SYMBOLS["ForwardMode"].path + ".is_decode", ("colour",))
    prepare_server_args(sys.argv[1:]).resolve_once()
