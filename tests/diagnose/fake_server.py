"""Canned answers of a DFLASH server, for the logic of ``diagnose``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import httpx

INFO: dict[str, Any] = {
    "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": "drafter",
    "speculative_num_draft_tokens": 16,
    "skip_tokenizer_init": False,
    "model_path": "target",
    "max_req_input_len": 8186,
    "launch_command": "--model-path target",
    "internal_states": [{"avg_spec_accept_length": 2.5}],
}
WORKER: dict[str, Any] = {
    "adaptive": False,
    "requests": {"asked": 48, "running": 48, "capped_by": "--max-running-requests"},
    "drafting": {"pays": True, "accept_length": 6.5, "break_even": 1.5, "known": {}},
    "width": {"policy": "fixed", "widths": [16]},
}


def server_info(launch_command: str = "", **worker: Any) -> dict[str, Any]:
    """``/server_info`` with our worker's entry."""
    return INFO | {"launch_command": launch_command, "internal_states": [{"sglang_dflash": WORKER | worker}]}


def meta(tokens: int, accepted: int, **more: Any) -> dict[str, Any]:
    """SGLang's figures of an answer, each of whose steps accepted as many drafts."""
    steps = max(1, tokens // (accepted + 1))
    histogram = [0] * accepted + [steps] + [0] * (15 - accepted)
    return {"completion_tokens": tokens, "spec_verify_ct": steps, "spec_correct_drafts_histogram": histogram, **more}


@contextlib.contextmanager
def serve(
    info: dict[str, Any] | None = None,
    status: int = 200,
    accepted: int = 3,
    answers: int = 1000,
    stuck: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Answer every client of this process; yields a URL.

    Args:
        status: of every reply.
        accepted: drafts per verify step of every answer.
        answers: number of prompts that are answered; the first one beyond them calls ``stuck``.
    """
    left = iter(range(answers))

    async def reply(request: httpx.Request) -> httpx.Response:
        content: Any = info
        if request.url.path == "/v1/tokenize":
            content = {"tokens": [*request.content]}
        elif request.url.path == "/generate":
            if next(left, None) is None:
                stuck()
                await asyncio.Event().wait()
            tokens = json.loads(request.content)["sampling_params"]["max_new_tokens"]
            content = {"text": "", "meta_info": meta(tokens, accepted)}
        return httpx.Response(status, json=content)

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(reply))
    with mock.patch.object(httpx, "AsyncClient", client):
        yield "http://server"
