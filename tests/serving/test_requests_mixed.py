"""Requests that decode beside a prefill (``--enable-mixed-chunk``) answer as ever.

Such a batch samples one more token of each of them, while the scheduler, under overlap, has not seen those of the step
before. A grammar then stands where it stood a step ago, and so does the history that a custom logit processor reads.
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from sglang_dflash_lab.pairs.corpus import Prompt, prompts
from tests.support.generation import Params, answers, tokens
from tests.support.pair_servers import RecordedServer
from tests.support.prompts import chat_ids, schema_of
from tests.support.servers import Server

pytestmark = pytest.mark.engine

# A class pickled by reference, as SGLang's ``to_str`` writes one.
PROCESSOR = json.dumps({"callable": b"cdflash_test_plugin.custom_processor\nBanAFifth\n.".hex()})
KINDS = ("json schema", "regex", "custom processor", "regex and penalty")


def params_of(kind: str, prompt: Prompt) -> Params:
    constraint: dict[str, Params] = {
        "json schema": {"json_schema": schema_of(prompt)},
        "regex": {"regex": "([A-Za-z ,]{1,30}[0-9]{1,3}[ .])*"},
        "custom processor": {"custom_params": {}},
        "regex and penalty": {"regex": "[A-Za-z ,.]{40,80}", "frequency_penalty": 1.0},
    }
    return {"temperature": 0, "max_new_tokens": 64, **constraint[kind]}


def test_requests_beside_a_prefill_answer_as_plain_decoding_does(
    plain_hybrid: Server, recorded_hybrid: RecordedServer
) -> None:
    # More prompts than may run, so that the rest are prefilled beside the first; no arrival has to be timed.
    asked, kinds = prompts("json", n=16), KINDS * 4
    params = [params_of(kind, prompt) for kind, prompt in zip(kinds, asked, strict=True)]
    body = {"custom_logit_processor": [PROCESSOR if kind == "custom processor" else None for kind in kinds]}
    inputs = chat_ids("tiny-hybrid", asked)
    expected = answers(plain_hybrid, inputs, params, **body)
    found = answers(recorded_hybrid.server, inputs, params, **body)
    for ours, plain, kind in zip(tokens(found), tokens(expected), kinds, strict=True):
        assert ours == plain, kind
    unseen = defaultdict(list)
    kind_of = {answer["meta_info"]["id"]: kind for answer, kind in zip(found, kinds, strict=True)}
    for line in map(json.loads, (recorded_hybrid.folder / "mixed.jsonl").read_text().splitlines()):
        unseen[kind_of.get(line["rid"])].append(line["unseen"])
    for kind in ("regex", "custom processor"):  # the longest answers
        assert unseen[kind] and min(unseen[kind]) > 0, f"{kind}: no prefill ran beside it, or the scheduler kept up"
