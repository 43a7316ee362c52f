"""Thirty prompts to a published model: greedy answers equal plain decoding's; a finished server is not repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang_dflash.launch.settings import DETERMINISTIC_FLAG
from sglang_dflash_lab.real.demo import COPIES_ALONE, PROMPTS
from sglang_dflash_lab.train.drafter import FULL, Drafter, DrafterConfig
from tests.real import MARKS, MODEL, REAL
from tests.serving.matrix import Record
from tests.serving.test_exact import TOP, numbers
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate_all
from tests.support.servers import ONE_WIDTH, running, worker_info

pytestmark = [*MARKS, pytest.mark.engine]

FINISHED = Record(REAL / "finished.jsonl")
NEW_TOKENS = 40
COMMON = ("--model-path", str(MODEL), "--max-running-requests", "4")
DTYPES = {"float32": ("--dtype", "float32"), "exact": ("--dtype", "bfloat16", DETERMINISTIC_FLAG)}
ARMS = ("fixed", "adaptive", "copies alone")
COPIED = 1.5  # tokens per step on texts and programs; adaptive widths depend on the costs that the start measured


def flags(arm: str, folder: Path) -> tuple[str, ...]:
    """The arm's flags; its drafter is untrained, which must not overrule copies."""
    if arm == "copies alone":
        return COPIES_ALONE
    write_untrained_drafter(folder / "drafter")
    drafts = (*COPIES_ALONE, "--speculative-draft-model-path", str(folder / "drafter"))
    return (*drafts, *(ONE_WIDTH if arm == "fixed" else ("--speculative-adaptive",)))


def write_untrained_drafter(folder: Path) -> None:
    keys = json.loads((MODEL / "config.json").read_text())
    keys |= {"rope_theta": keys["rope_parameters"]["rope_theta"], "num_target_layers": keys["num_hidden_layers"]}
    keys |= {"layer_types": (FULL,), "sliding_window": None, "block_size": 16, "mask_token_id": 0}
    keys |= {"target_layer_ids": (keys["num_hidden_layers"] // 2,)}
    torch.manual_seed(0)
    Drafter(DrafterConfig(**{name: keys[name] for name in DrafterConfig.__annotations__ if name in keys})).save(folder)


def inputs() -> list[list[int]]:
    """Token ids of the prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    asked = [list(messages) for _, messages in PROMPTS]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)  # type: ignore[no-any-return]


def test_each_digit_is_a_token_and_spaces_before_it_stay_together() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.tokenize("Pay 123  4.") == ["Pay", "Ġ", "1", "2", "3", "ĠĠ", "4", "."]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 8192)


def seen(answer: Answer, *, exact: bool) -> list[Any]:
    return [answer.tokens, answer.meta["finish_reason"], numbers(answer) if exact else None]


def answers(dtype: str, folder: Path, *more: str) -> tuple[dict[str, Any], list[float], Any]:
    """Answers by number of users, tokens per step of each prompt alone, and the worker's part of ``/server_info``."""
    exact, found = dtype == "exact", {}
    with running(folder, *COMMON, *DTYPES[dtype], *more) as server:
        for users in (1, 4):
            flush(server)
            given = generate_all(server, inputs(), users, NEW_TOKENS, **(TOP if exact else {}))
            found[str(users)] = [seen(answer, exact=exact) for answer in given]
            if users == 1:
                steps = [len(each.tokens) / each.meta.get("spec_verify_ct", len(each.tokens)) for each in given]
        if not more:
            return found, steps, None
        assert_nothing_leaked(server)
        return found, steps, worker_info(server)


def plain(dtype: str, folder: Path) -> dict[str, Any]:
    if dtype not in FINISHED.results():
        FINISHED.add(dtype, answers(dtype, folder)[0])
    stored: dict[str, Any] = FINISHED.results()[dtype]
    assert stored["1"] == stored["4"], "plain decoding depends on its batch"
    return stored


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_plain_decodings(dtype: str, arm: str, tmp_path: Path) -> None:
    if f"{dtype} {arm}" in FINISHED.results():
        pytest.skip("passed before with this very package (tests/serving/matrix.py)")
    expected = plain(dtype, tmp_path)
    found, steps, info = answers(dtype, tmp_path, *flags(arm, tmp_path))
    different = [
        (users, PROMPTS[i][0], i) for users in found for i in range(30) if found[users][i] != expected[users][i]
    ]
    by_kind = {kind: sum(steps[i : i + 10]) / 10 for i, kind in ((0, "text"), (10, "code"), (20, "chat"))}
    print(f"{dtype} {arm}: tokens per step {by_kind}, exact {info['exact']}, steps by width {info['steps_by_width']}")
    assert not different
    assert info["exact"] is (dtype == "exact")
    assert min(by_kind["text"], by_kind["code"]) > COPIED
    FINISHED.add(f"{dtype} {arm}", by_kind)
