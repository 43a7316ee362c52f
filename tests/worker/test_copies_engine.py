"""Blocks that are copied from the request: text and grammars stay as they are, and fewer steps are taken.

The shared server compares the histories on the device with the host's tokens before each step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs.corpus import prompts
from tests.support.generation import Answer, answers, generate_all, tokens, tokens_per_step
from tests.support.prompts import message_ids, schema_of
from tests.support.servers import FEATURES, WIDE_WIDTHS, Server, changed_drafter, dflash_server, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 64
TASKS = ("edit-json", "edit-code", "edit-chat", "repeat")


def repeats(each: int, seed: int = 0, tasks: tuple[str, ...] = TASKS) -> list[list[int]]:
    """Prompts whose answers repeat what they hold, as token ids."""
    return message_ids(PAIR, [messages for task in tasks for messages in load(task, each, seed=seed)])


def texts(found: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in found]


@pytest.fixture(params=["random_widths_hybrid", pytest.param("copies_alone", marks=pytest.mark.slow)])
def copying(request: pytest.FixtureRequest) -> Server:
    """With a drafter, and without one."""
    served: Server = request.getfixturevalue(request.param)
    return served


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_repeats_are_copied_and_the_text_stays(concurrency: int, copying: Server, plain_hybrid: Server) -> None:
    inputs = repeats(4, seed=concurrency)
    before = worker_info(copying)
    found = generate_all(copying, inputs, concurrency, NEW_TOKENS)
    assert texts(found) == texts(generate_all(plain_hybrid, inputs, 8, NEW_TOKENS))
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


@pytest.mark.slow
def test_an_untrained_drafter_vetoes_no_copy(plain_hybrid: Server, tmp_path: Path) -> None:
    """Of one with random weights, which is sure of wrong tokens, the server learns it within a few answers."""
    drafter = changed_drafter(PAIR, tmp_path)
    file = drafter / "model.safetensors"
    noise = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(each.shape, generator=noise) for name, each in load_file(file).items()}
    save_file({name: 3 * each if each.ndim > 1 else each.abs() for name, each in weights.items()}, file)
    inputs = repeats(6, seed=5)
    expected = texts(generate_all(plain_hybrid, inputs, 8, NEW_TOKENS))
    lengths = []
    for folder in (drafter, None):
        with dflash_server(PAIR, tmp_path, *WIDE_WIDTHS, base=FEATURES, drafter=folder) as server:
            for _ in range(2):
                found = generate_all(server, inputs, 1, NEW_TOKENS)
                assert texts(found) == expected
            lengths.append(tokens_per_step(found))
    untrained, alone = lengths
    assert alone > 3 and untrained > 0.95 * alone, lengths
