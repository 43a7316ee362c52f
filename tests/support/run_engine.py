"""Run ``sglang.Engine`` in a separate process: keywords and requests in JSON, answers or their chunks as last line."""

from __future__ import annotations

import copy
import json
import sys

import sglang


def main() -> None:
    asked = json.loads(sys.argv[1])
    with sglang.Engine(**asked["keywords"]) as engine:
        answers = [engine.generate(**request) for request in asked["requests"]]
        answers = [
            each if isinstance(each, dict | list) else [copy.deepcopy(chunk) for chunk in each] for each in answers
        ]
        info = engine.get_server_info()
    states = info.pop("internal_states")
    print(json.dumps({"answers": answers, "state": states[0], "info": info}, default=str))


if __name__ == "__main__":  # the engine's processes import this file
    main()
