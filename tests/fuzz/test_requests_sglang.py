"""Sampling parameters that SGLang lets through and no sampler can compute with: refused, and nothing breaks behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.fuzz import requests
from tests.fuzz.part import run

pytestmark = pytest.mark.sglang

GOOD: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "logit_bias": {"3": -100.0}, "min_new_tokens": 2}
# One of these in a batch ended the scheduler, of SGLang without speculation too: an overflow, an index or a NaN.
BAD: list[dict[str, Any]] = [
    {"top_k": 1 << 40},
    {"top_k": float("nan")},
    {"logit_bias": {"3": float("nan")}},
    {"logit_bias": {"3": float("inf")}},
    {"logit_bias": {"3": 1e39}},
    {"logit_bias": {"3": "much"}},
    {"logit_bias": {str(token): float("-inf") for token in range(requests.VOCAB)}},
    {"repetition_penalty": 1e-300},
    {"temperature": 1e300, "logit_bias": {"3": float("-inf")}},
]


@pytest.mark.parametrize("params", BAD, ids=lambda params: ascii(params)[:60])
def test_what_no_sampler_can_compute_with_is_refused(params: dict[str, Any]) -> None:
    """By name; the batch that it still passes through, as SGLang prefills refused requests, is sampled."""
    (refusal,) = [each for each in requests.serve([params, GOOD]) if each is not None]
    assert next(iter(params)) in refusal
    assert "Expected: " in refusal and "Remedy: " in refusal


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": -1},
        {"stop_token_ids": [requests.VOCAB]},  # an index out of range beside the other's min_new_tokens
        {"stop_token_ids": [-1, 1 << 63, 3], "min_new_tokens": 1},
        {"stop_token_ids": [2], "min_new_tokens": 3},
        {"logit_bias": {"3": float("-inf"), "4": 100.0}},
        {"repetition_penalty": 0.01, "frequency_penalty": 2.0},
        {"temperature": 100.0, "min_p": 1.0, "top_p": 1e-300},
        {"temperature": 0.0, "sampling_seed": -(1 << 63)},
    ],
    ids=ascii,
)
def test_what_is_merely_unusual_is_served(params: dict[str, Any]) -> None:
    assert requests.serve([params, GOOD]) == [None, None]


def test_a_short_run_has_no_finding(tmp_path: Path) -> None:
    logging.disable()
    try:
        (part,) = requests.parts(tmp_path)
        outcome = run(part, 400)
    finally:
        logging.disable(logging.NOTSET)
    assert not [str(finding) for finding in outcome.judge.findings]
