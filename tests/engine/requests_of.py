"""What the request tests share: servers with a tokenizer and every request feature on, and their answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from sglang_dflash.pairs import target_path
from sglang_dflash.pairs.corpus.prompts import Prompt
from tests.engine.dflash import TRACKED, draft_arguments
from tests.engine.serving import Server, running

PAIR = "tiny-hybrid"
FEATURES = (
    *("--dtype", "float32", "--max-running-requests", "16", *TRACKED),
    *("--enable-custom-logit-processor", "--enable-return-hidden-states"),
)
COMPACT_JSON = "--constrained-json-disable-any-whitespace"  # an answer then cannot end in spaces without end
# Every device-to-host wait inside a step raises.
STRICT = {"SGLANG_DFLASH_FORBID_SYNC": "1"}
# Without overlap, plain decoding applies several penalties in an order of its own in every process.
PENALTY_ORDER = str(Path(__file__).parent / "penalty_order")

Params = dict[str, Any]


@contextlib.contextmanager
def plain_server(folder: Path, *arguments: str, plugins: str = PENALTY_ORDER) -> Iterator[Server]:
    command = ("--model-path", str(target_path(PAIR)), *FEATURES, *arguments)
    with running(folder, *command, PYTHONPATH=plugins) as server:
        yield server


@contextlib.contextmanager
def dflash_server(
    folder: Path, *arguments: str, drafter: str = "good", block: int = 16, **environment: str
) -> Iterator[Server]:
    command = ("--model-path", str(target_path(PAIR)), *FEATURES, *draft_arguments(PAIR, drafter, block), *arguments)
    with running(folder, *command, **environment) as server:
        assert server.get("/server_info").json()["internal_states"][0]["sglang_dflash"]["block_size"] == block
        yield server


def random_prompts(number: int, length: int = 24) -> list[list[int]]:
    """Token ids in no order: behind text that it never saw the target is unsure of every token."""
    vocab = json.loads((target_path(PAIR) / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (number, length), generator=generator).tolist()


def chat_ids(asked: Sequence[Prompt]) -> list[list[int]]:
    """The prompts as the pair's chat template renders them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path(PAIR))
    render = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    return [render(list(prompt.messages)) for prompt in asked]


def schema_of(prompt: Prompt) -> str:
    """What the question asks for: its keys, in its order."""
    kinds = {str: {"type": "string", "maxLength": 16}, int: {"type": "integer", "minimum": 0, "maximum": 999}}
    properties = {key: kinds[type(value)] for key, value in prompt.expected.items()}
    shape = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return json.dumps(shape)


def answers(
    server: Server, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params], **body: Any
) -> list[dict[str, Any]]:
    """One request holding every prompt; ``params`` for all of them or one for each."""
    response = raw(server, prompts, params, **body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()
    return found


def raw(
    server: Server, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params], **body: Any
) -> httpx.Response:
    return server.post("/generate", {"input_ids": [list(p) for p in prompts], "sampling_params": params, **body})


def tokens(found: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in found]
