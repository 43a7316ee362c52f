"""``sglang.Engine`` in a process of its own: keywords and requests as JSON on stdin, the answers as its last line."""

from __future__ import annotations

import json
import sys

import sglang


def main() -> None:
    asked = json.load(sys.stdin)
    with sglang.Engine(**asked["keywords"]) as engine:
        answers = [engine.generate(**request) for request in asked["requests"]]
        state = engine.get_server_info()["internal_states"][0]
    print(json.dumps({"answers": answers, "state": state}, default=str))


if __name__ == "__main__":  # the engine's processes import this file
    main()
