"""Each cause is named first when it is the cause, and a healthy server gets no sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_dflash.diagnose.cost import Narrower
from sglang_dflash.diagnose.server import Server
from sglang_dflash.diagnose.verdict import SENTENCES, Findings, Other, verdict

SERVER = Server(
    ours=True,
    target="Qwen/Qwen3.5-4B",
    drafter="z-lab/Qwen3.5-4B-DFlash",
    dtype="bfloat16",
    quantised={},
    block=16,
    adaptive=False,
    asked=48,
    running=48,
    capped_by="--max-running-requests",
    raised_by="",
    copies=None,
    broken_drafts=0,
    expected=None,
    so_far=6.5,
    unpaid=None,
    busy=0,
    longest_prompt=8000,
)
OTHERS = (
    Other("thinking off", 4.0, '"chat_template_kwargs": {"enable_thinking": true}'),
    Other("raw prompts", 2.0, "POST /v1/chat/completions"),
    Other("temperature 1", 6.2, '"temperature": 0'),
)
WELL = Findings(SERVER, 6.6, (7.0, "its card"), others=OTHERS, narrower=Narrower(16, 1.0))
LOW = replace(WELL, measured=4.0)


def on(findings: Findings, **server: Any) -> Findings:
    return replace(findings, server=replace(findings.server, **server))


def test_a_healthy_server_gets_no_sentence() -> None:
    assert verdict(WELL) == []
    assert verdict(replace(WELL, stated=None)) == []
    assert verdict(on(WELL, so_far=None)) == []


@pytest.mark.parametrize(
    ("findings", "named"),
    [
        (replace(WELL, measured=1.4), ("guesses", "--speculative-draft-model-path")),
        (replace(WELL, measured=1.4, stated=None), ("guesses", "--speculative-draft-model-path")),
        (LOW, ("another revision", "--speculative-draft-model-revision")),
        (replace(LOW, other_target="Qwen/Qwen3.5-27B"), ("Qwen/Qwen3.5-27B", "--speculative-draft-model-path")),
        (on(LOW, dtype="float16"), ("float16", "--dtype bfloat16")),
        (on(WELL, dtype="float16"), ("float16", "--dtype bfloat16")),
        (on(LOW, broken_drafts=3), ("3 drafts were not finite", "card")),
        (on(LOW, quantised={"drafter": "fp8"}), ("fp8", "--speculative-draft-model-quantization")),
        (on(LOW, quantised={"target": "awq"}), ("awq", "--quantization")),
        (replace(LOW, has_template=False), ("no chat template", "--chat-template")),
        (replace(WELL, has_template=False), ("no chat template", "--chat-template")),
        (on(WELL, so_far=2.1), ("'raw prompts'", "/v1/chat/completions")),
        (on(WELL, so_far=4.4), ("'thinking off'", '"enable_thinking": true')),
        (on(WELL, unpaid={"causes": [{"cause": "grammar", "remedy": "relax it"}]}), ("grammar", "relax it")),
        (
            on(WELL, running=12, capped_by="recurrent states", raised_by="--mamba-ssm-dtype bfloat16"),
            ("12 of 48", "recurrent states", "--mamba-ssm-dtype", "--mem-fraction-static"),
        ),
        (replace(WELL, narrower=Narrower(4, 1.6)), ("8 users", "--speculative-num-draft-tokens 4")),
    ],
)
def test_the_cause_comes_first_with_what_to_change(findings: Findings, named: tuple[str, ...]) -> None:
    first = verdict(findings)[0]
    assert all(part in first for part in named), first


def test_traffic_between_the_probes_and_adaptive_widths_are_not_blamed() -> None:
    assert verdict(on(WELL, so_far=5.5)) == []
    assert verdict(on(WELL, unpaid={"causes": []}, so_far=None)) == []


def test_no_more_than_three_sentences_the_likeliest_cause_first() -> None:
    everything = replace(
        on(LOW, dtype="float16", quantised={"target": "fp8"}, running=12),
        narrower=Narrower(4, 2.0),
        other_target="other",
    )
    told = verdict(everything)
    assert len(told) == SENTENCES
    assert "float16" in told[0] and "other" in told[1]


def test_a_wrong_drafter_wants_no_narrower_block() -> None:
    assert len(verdict(replace(LOW, narrower=Narrower(2, 2.0)))) == 1


def test_a_narrow_block_is_not_a_guessing_drafter() -> None:
    assert verdict(replace(on(WELL, block=2), measured=1.8, stated=None, others=())) == []
