"""What clients see of a published model under copied drafts is what they see of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from sglang_dflash_lab.real.demo import COPIES_ALONE, PROMPTS
from tests.real import MARKS
from tests.real.test_equality import COMMON, DTYPES, inputs
from tests.support.generation import generate_all
from tests.support.pair_servers import worker_info
from tests.support.servers import Server, running

pytestmark = [*MARKS, pytest.mark.engine]

# The number of heads, 9, is a multiple of three, not of two.
RANKS = ("--tp-size", "3")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "port": {"type": "integer"}},
    "required": ["name", "port"],
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Plain decoding, and copies."""
    common = (*COMMON, *DTYPES["float32"])
    with (
        running(tmp_path_factory.mktemp("plain"), *common) as plain,
        running(tmp_path_factory.mktemp("copies"), *common, *COPIES_ALONE) as copies,
    ):
        yield plain, copies


def chat(server: Server, number: int, **options: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600) as client:
        messages: Any = list(PROMPTS[number][1])
        reply: Any = client.chat.completions.create(
            **{"model": "default", "messages": messages, "temperature": 0, "max_tokens": 64, **options}
        )
        return list(reply) if options.get("stream") else reply  # a stream ends with its client


def test_stops(servers: tuple[Server, Server]) -> None:
    for number, stop in ((0, ["Monday"]), (10, ["\n\n"]), (13, ["logger", "item"]), (20, ["."])):
        plain, copied = (chat(server, number, stop=stop) for server in servers)
        assert copied.choices[0].message.content == plain.choices[0].message.content
        assert copied.choices[0].finish_reason == plain.choices[0].finish_reason == "stop"
        assert copied.usage == plain.usage


def test_streams_and_their_usage(servers: tuple[Server, Server]) -> None:
    for number in (2, 12, 23):
        whole = chat(servers[0], number)
        chunks = chat(servers[1], number, stream=True, stream_options={"include_usage": True})
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        )
        used = chunks[-1].usage
        assert (used.prompt_tokens, used.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )
        assert len(chunks) < used.completion_tokens


def test_log_probabilities(servers: tuple[Server, Server]) -> None:
    top = {"return_logprob": True, "top_logprobs_num": 4}
    plain, copied = (generate_all(server, inputs(6), 2, 48, **top) for server in servers)
    for ours, theirs in zip(copied, plain, strict=True):
        for mine, own in zip(ours.meta["output_top_logprobs"], theirs.meta["output_top_logprobs"], strict=True):
            assert [token for _, token, _ in mine] == [token for _, token, _ in own]
            assert [value for value, *_ in mine] == pytest.approx([value for value, *_ in own], abs=1e-3)


def test_a_schema(servers: tuple[Server, Server]) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "service", "schema": SCHEMA}}
    plain, copied = (chat(server, 12, response_format=shape) for server in servers)
    assert copied.choices[0].message.content == plain.choices[0].message.content
    assert json.loads(copied.choices[0].message.content).keys() == {"name", "port"}
    assert copied.usage == plain.usage


def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    common = (*COMMON, *DTYPES["float32"], *RANKS)
    with running(tmp_path, *common) as server:
        plain = generate_all(server, inputs(6), 2, 48)
    with running(tmp_path, *common, *COPIES_ALONE) as server:
        copied = generate_all(server, inputs(6), 2, 48)
        assert worker_info(server)["mean_accept_length"] > 2
    assert [each.tokens for each in copied] == [each.tokens for each in plain]
