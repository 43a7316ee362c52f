"""Run ``sglang.Engine`` in a separate process: JSON keywords and requests (argument or stdin), answers as last line."""

from __future__ import annotations

import json
import sys

import sglang
from sglang.srt.server_args import ServerArgs


def main() -> None:
    asked = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())
    keywords = asked["keywords"]
    if asked.get("hand_built"):
        keywords = {"server_args": ServerArgs(**keywords)}
    with sglang.Engine(**keywords) as engine:
        answers = [engine.generate(**request) for request in asked["requests"]]
        info = engine.get_server_info()
    states = info.pop("internal_states")
    print(json.dumps({"answers": answers, "state": states[0], "info": info}, default=str))


if __name__ == "__main__":  # the engine's processes import this file
    main()
