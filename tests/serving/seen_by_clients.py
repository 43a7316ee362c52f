"""What clients see of SGLang's own DFLASH worker and of ours that they do not see of plain decoding: a table.

``python -m tests.serving.seen_by_clients`` starts one server after the other on the CPU platform, sends them the same
greedy requests in float32, and counts the answers that differ (docs/results/sglang-worker.md).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.serving.test_ends import ENDS, PAIR, PROMPTS, params_of, seen, turns
from tests.serving.test_requests import SCORED, WITH_STATE
from tests.support.chats import events
from tests.support.generation import answers, flush, generate, tokens
from tests.support.pair_servers import FEATURES, draft_arguments, target_arguments, with_plugin
from tests.support.prompts import corpus
from tests.support.servers import Server, running

PEERS = Path(__file__).parents[2] / "lab/sglang_dflash_lab/measure/peers"
TRACKED = ("--mamba-radix-cache-strategy", "extra_buffer")
POOL = 704
# Case -> the public report of it, in this or another engine.
REPORTS = {
    "two strings": "vLLM 49391",
    "token before string": "SGLang 28802",
    "two patterns": "",
    "string and pattern": "",
    "pattern at the window's edge": "",
    "session after end of text": "",
    "session after two strings": "",
    "request for no token": "",
    "processor with state": "vLLM 18902",
    "reasoning_tokens": "",
    "streamed emoji and Chinese": "SGLang 34852",
    "a pool that just holds the request": "SGLang 14942",
}


def streamed(server: Server, text: str) -> str:
    body = {"text": f"Repeat: {text * 12} ", "stream": True}
    params = {"temperature": 0, "regex": f"({text}){{9}}", "max_new_tokens": 100}
    return str(events(server.post("/generate", {**body, "sampling_params": params}))[-1]["text"])


def thoughts(server: Server) -> list[Any]:
    def ask(question: int, most: int) -> Any:
        message = {"role": "user", "content": f"Tom has {question} apples and buys 4 more. How many apples has he?"}
        body = {"model": "m", "messages": [message], "temperature": 0, "max_tokens": most}
        usage = server.post("/v1/chat/completions", body).json()["usage"]
        return usage["completion_tokens"], (usage.get("completion_tokens_details") or usage).get("reasoning_tokens")

    return [ask(question, most) for question in range(2, 14) for most in (2, 7, 21)]


def looked_at(server: Server, greedy: list[list[int]]) -> dict[str, list[Any]]:
    prompts = corpus(PAIR, PROMPTS)
    flush(server)
    found: dict[str, list[Any]] = {}
    for kind in ENDS:
        ended = [seen(each) for each in answers(server, prompts, params_of(kind, greedy), return_logprob=True)]
        found[kind] = [{**each, "cached_tokens": None} for each in ended]
    for kind in ("end of text", "two strings"):
        found[f"session after {kind}"] = turns(server, kind, greedy, streaming=False)
    scored = answers(server, prompts, **SCORED)
    found["request for no token"] = [len(each["meta_info"]["output_token_logprobs"]) for each in scored]
    state = {"custom_logit_processor": json.dumps({"callable": WITH_STATE.hex()})}
    params = {"temperature": 0, "max_new_tokens": 32, "custom_params": {}}
    found["processor with state"] = tokens(answers(server, prompts, params, **state))
    found["reasoning_tokens"] = thoughts(server)
    found["streamed emoji and Chinese"] = [streamed(server, text) for text in ("🙂é漢", "漢字🙂", "🎉漢", "漢🙂 ")]
    return found


def short_pool(server: Server) -> list[Any]:
    prompts = [(corpus(PAIR, 24, seed=n)[0] * 20)[:n] for n in (400, 520, 650)]
    bodies = [{"input_ids": p, "sampling_params": {"temperature": 0, "max_new_tokens": 400}} for p in prompts]
    replies = [server.post("/generate", body) for body in bodies]
    return [reply.json()["output_ids"] if reply.status_code == 200 else reply.status_code for reply in replies]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    drafting, builtin = draft_arguments(PAIR), {"SGLANG_DFLASH": "builtin", "TORCHDYNAMO_DISABLE": "1"}
    wide = ("--speculative-adaptive", "--speculative-adaptive-config", "tests/fixtures/widths/fixed.json")
    arms: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "plain": (("--disable-overlap-schedule",), {}),
        "SGLang's worker": (drafting, builtin),
        "this package": (drafting, {}),
        "this package, copies": ((*drafting, *wide), {}),
    }
    found: dict[str, dict[str, list[Any]]] = {}
    greedy: list[list[int]] = []
    for name, (flags, environment) in arms.items():
        folder = Path(tempfile.mkdtemp())
        environment = with_plugin(folder, *(["penalty_order"] if name == "plain" else [])) | environment
        if environment.get("SGLANG_DFLASH"):
            environment["PYTHONPATH"] += os.pathsep + str(PEERS)
        command = (*target_arguments(PAIR, FEATURES), *TRACKED, *flags)
        with running(folder, *command, **environment) as server:
            greedy = greedy or [generate(server, prompt, 64).tokens for prompt in corpus(PAIR, PROMPTS)]
            found[name] = looked_at(server, greedy)
        with running(folder, *command, "--max-total-tokens", str(POOL), **environment) as server:
            found[name]["a pool that just holds the request"] = short_pool(server)
    plain = found.pop("plain")
    print("| case | public report | " + " | ".join(found) + " |\n|---|---|" + "---|" * len(found))
    for case, expected in plain.items():
        differing = [sum(a != b for a, b in zip(arm[case], expected, strict=True)) for arm in found.values()]
        cells = [f"{count} of {len(expected)}" for count in differing]
        print(f"| {case} | {REPORTS.get(case, '')} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
