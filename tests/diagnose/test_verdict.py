"""Each planted cause is named first, and a healthy server gets no sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_dflash.causes import NO_TEMPLATE, QUANTISED_DRAFTER, QUANTISED_TARGET, SAMPLING, THINKING
from sglang_dflash.diagnose.probe import Server
from sglang_dflash.diagnose.verdict import SENTENCES, Findings, Smaller, Variation, verdict

SERVER = Server(
    worker="sglang-dflash",
    target="Qwen/Qwen3.5-4B",
    drafter="z-lab/Qwen3.5-4B-DFlash",
    dtype="bfloat16",
    quantised={},
    block=16,
    adaptive=False,
    max_running_requests=48,
    concurrent_requests=48,
    limited_by="--max-running-requests",
    raised_by="",
    copied_blocks=None,
    not_finite_drafts=0,
    expected_per_block=None,
    recent_accept_length=6.5,
    recent_cause=None,
    other_running_requests=0,
    longest_prompt=8000,
)
VARIATIONS = (
    Variation("thinking off", THINKING[False], 4.0),
    Variation("raw prompts", NO_TEMPLATE, 2.0),
    Variation("temperature 1", SAMPLING, 6.2),
)
WELL = Findings(SERVER, 6.6, (7.0, "its card"), variations=VARIATIONS, smaller=Smaller(16, 1.0))
LOW = replace(WELL, measured=4.0)


def on(findings: Findings, **server: Any) -> Findings:
    return replace(findings, server=replace(findings.server, **server))


def test_a_healthy_server_gets_no_sentence() -> None:
    assert verdict(WELL) == []
    assert verdict(replace(WELL, stated=None)) == []
    assert verdict(on(WELL, recent_accept_length=None)) == []


@pytest.mark.parametrize(
    ("findings", "named"),
    [
        (replace(WELL, measured=1.4), ("drafter of another target", "--speculative-draft-model-path")),
        (replace(WELL, measured=1.4, stated=None), ("drafter of another target", "--speculative-draft-model-path")),
        (LOW, ("Likely cause: drafter.", "--speculative-draft-model-revision")),
        (replace(LOW, other_target="Qwen/Qwen3.5-27B"), ("Qwen/Qwen3.5-27B", "--speculative-draft-model-path")),
        (on(LOW, dtype="float16"), ("float16", "--dtype bfloat16")),
        (on(WELL, dtype="float16"), ("float16", "--dtype bfloat16")),
        (on(LOW, not_finite_drafts=3), ("drafts not finite (3 positions)", "card")),
        (on(LOW, quantised={QUANTISED_DRAFTER: "fp8"}), ("fp8", "--speculative-draft-model-quantization")),
        (on(LOW, quantised={QUANTISED_TARGET: "awq"}), ("awq", "--quantization")),
        (replace(LOW, has_template=False), ("no chat template", "--chat-template")),
        (replace(WELL, has_template=False), ("no chat template", "--chat-template")),
        (on(WELL, recent_accept_length=2.1), ("'raw prompts'", "/v1/chat/completions")),
        (on(WELL, recent_accept_length=4.4), ("'thinking off'", '"enable_thinking": true')),
        (on(WELL, recent_cause="grammar. Fix: relax it"), ("grammar", "relax it")),
        (
            on(WELL, concurrent_requests=12, limited_by="recurrent states", raised_by="--mamba-ssm-dtype bfloat16"),
            ("12 of 48", "recurrent states", "--mamba-ssm-dtype", "--mem-fraction-static"),
        ),
        (replace(WELL, smaller=Smaller(4, 1.6)), ("8 concurrent users", "--speculative-num-draft-tokens 4")),
    ],
)
def test_the_planted_cause_comes_first_with_its_fix(findings: Findings, named: tuple[str, ...]) -> None:
    first = verdict(findings)[0]
    assert all(part in first for part in named), first


def test_traffic_between_the_probes_is_not_blamed() -> None:
    assert verdict(on(WELL, recent_accept_length=5.5)) == []
    assert verdict(on(WELL, recent_accept_length=None)) == []


def test_at_most_three_sentences_likeliest_cause_first() -> None:
    everything = replace(
        on(LOW, dtype="float16", quantised={QUANTISED_TARGET: "fp8"}, concurrent_requests=12),
        smaller=Smaller(4, 2.0),
        other_target="other",
    )
    sentences = verdict(everything)
    assert len(sentences) == SENTENCES
    assert "float16" in sentences[0] and "other" in sentences[1]


def test_no_smaller_block_for_a_wrong_drafter() -> None:
    assert len(verdict(replace(LOW, smaller=Smaller(2, 2.0)))) == 1


def test_a_small_block_is_not_a_wrong_drafter() -> None:
    assert verdict(replace(on(WELL, block=2), measured=1.8, stated=None, variations=())) == []
