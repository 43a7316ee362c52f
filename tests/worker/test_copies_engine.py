"""Blocks that are copied from the request: text and grammars stay as they are, and fewer steps are taken.

The shared server compares the histories on the device with the host's tokens before each step.
"""

from __future__ import annotations

import json

import pytest

from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs.corpus import prompts
from tests.support.generation import answers, generate_all, tokens
from tests.support.prompts import message_ids, schema_of
from tests.support.servers import Server, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 64
TASKS = ("edit-json", "edit-code", "edit-chat", "repeat")


@pytest.fixture(params=["random_widths_hybrid", pytest.param("copies_alone", marks=pytest.mark.slow)])
def copying(request: pytest.FixtureRequest) -> Server:
    """With a drafter, and without one."""
    served: Server = request.getfixturevalue(request.param)
    return served


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_repeats_are_copied_and_the_text_stays(concurrency: int, copying: Server, plain_hybrid: Server) -> None:
    inputs = message_ids(PAIR, [messages for task in TASKS for messages in load(task, 4, seed=concurrency)])
    before = worker_info(copying)
    found = generate_all(copying, inputs, concurrency, NEW_TOKENS)
    expected = generate_all(plain_hybrid, inputs, 8, NEW_TOKENS)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    after = worker_info(copying)
    copied, tokens = ("copied_blocks_by_match_length", "copied_tokens")
    assert sum(after[copied].values()) >= sum(before[copied].values()) + len(inputs)
    assert after[tokens] >= before[tokens] + 2 * len(inputs)
    assert all(4 <= int(length) <= 16 for length in after[copied])


def test_a_grammar_refuses_what_a_copy_proposes(copying: Server, plain_hybrid: Server) -> None:
    """The conversation shows answers to the same questions that the schema forbids, and asks again."""
    asked = prompts("json", n=12, shape="single")
    shown = [
        ({"role": "user", "content": prompt.messages[0]["content"]}, {"role": "assistant", "content": prompt.answer})
        for prompt in asked
    ]
    inputs = message_ids(PAIR, [(*turn, turn[0]) for turn in shown])
    params = []
    for prompt in asked:
        schema = json.loads(schema_of(prompt))
        for value in schema["properties"].values():  # the values of the answer that is shown break it
            value |= {"maxLength": 2} if value["type"] == "string" else {"minimum": 1000, "maximum": 9999}
        params.append({"temperature": 0, "max_new_tokens": 120, "json_schema": json.dumps(schema)})
    before = worker_info(copying)["copied_blocks_by_match_length"]
    found, expected = (answers(server, inputs, params) for server in (copying, plain_hybrid))
    assert tokens(found) == tokens(expected)
    for answer in found:
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            values = json.loads(answer["text"])
            assert all(len(v) <= 2 if isinstance(v, str) else v >= 1000 for v in values.values()), values
    after = worker_info(copying)["copied_blocks_by_match_length"]
    assert sum(after.values()) > sum(before.values())
