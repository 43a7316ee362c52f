"""What clients see of a published model under copied drafts is what they see of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash_lab.real.demo import COPIES_ALONE, PROMPTS
from tests.real import MARKS
from tests.real.test_equality import COMMON, DTYPES, inputs
from tests.support.chats import events, seen
from tests.support.generation import generate_all
from tests.support.servers import Server, running, worker_info

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


STOPS = {0: ["Monday"], 10: ["\n\n"], 13: ["logger", "item"], 20: ["."]}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHATS: list[tuple[int, dict[str, Any]]] = [
    *((number, {"stop": stop}) for number, stop in STOPS.items()),
    *((number, STREAM) for number in (2, 12, 23)),
    (12, {"response_format": {"type": "json_schema", "json_schema": {"name": "service", "schema": SCHEMA}}}),
]


@pytest.mark.parametrize(("number", "options"), CHATS)
def test_a_chat(number: int, options: dict[str, Any], servers: tuple[Server, Server]) -> None:
    body = {"model": "default", "messages": [*PROMPTS[number][1]], "temperature": 0, "max_tokens": 64, **options}
    plain, copied = (server.post("/v1/chat/completions", body) for server in servers)
    assert seen(copied) == seen(plain)
    if "stop" in options:
        assert seen(copied)["finish_reason"] == "stop"
    if "stream" in options:
        assert len(events(copied)) < len(events(plain))
    if "response_format" in options:
        assert json.loads(seen(copied)["content"]).keys() == {"name", "port"}


def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    common = (*COMMON, *DTYPES["float32"], *RANKS)
    with running(tmp_path, *common) as server:
        plain = generate_all(server, inputs(6), 2, 48)
    with running(tmp_path, *common, *COPIES_ALONE) as server:
        copied = generate_all(server, inputs(6), 2, 48)
        assert worker_info(server)["mean_accept_length"] > 2
    assert [each.tokens for each in copied] == [each.tokens for each in plain]
