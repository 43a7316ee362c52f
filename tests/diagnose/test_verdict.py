"""Each planted cause is named first, and a healthy server gets no sentence."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.causes import NO_TEMPLATE, OTHER_TARGET, SAMPLING, THINKING
from sglang_dflash.check.diagnose.probe import Probe, Server
from sglang_dflash.check.diagnose.verdict import SENTENCES, Diagnosis, Reference, find_reference
from tests.diagnose.fake_server import WORKER, meta, server_info

CARD = Reference("its card", True, {"math": 7.0})


def probe(name: str, accept_length: float, cause: str = "", **fields: Any) -> Probe:
    width = fields.pop("width", None)
    answer = meta(100, 5, spec_cap_length=width) | {"completion_tokens": 100 * accept_length, "spec_verify_ct": 100}
    found = Probe(name, cause, **fields)
    found.answers, found.seconds = [("math", answer)], 1.0
    return found


def report(
    measured: float = 6.6,
    reference: Reference | None = CARD,
    *,
    template: bool = True,
    step_width: float | None = None,
    drafting: dict[str, Any] | None = None,
    **info: Any,
) -> Diagnosis:
    """The report of a healthy server, unless something is planted."""
    drafting = WORKER["drafting"] | (drafting or {})
    planted = (("thinking off", 4.0, THINKING[False]), ("raw prompts", 2.0, NO_TEMPLATE), ("hot", 6.2, SAMPLING))
    variations = [probe(*each) for each in planted]
    first, last = (probe(name, measured, template=template, width=step_width) for name in ("chat template", "8 users"))
    server = Server(server_info(drafting=drafting, **info))
    return Diagnosis(server, [first, *(variations if template else []), last], reference)


def requests(raised_by: str) -> dict[str, Any]:
    return {"asked": 48, "running": 12, "capped_by": "recurrent states", "raised_by": raised_by}


def known(**causes: str | None) -> dict[str, Any]:
    return {"known": {name.replace("_", " "): evidence for name, evidence in causes.items()}}


@pytest.mark.parametrize(
    "healthy",
    [
        report(),
        report(reference=None),
        report(drafting={"pays": None, "accept_length": 1.2}),  # too few blocks for a judgement
        report(drafting={"accept_length": 5.5}),  # between the probes
        report(1.8, None, drafted=2),  # a small block is not a wrong drafter
        report(drafting=known(quantised_target="awq")),
    ],
)
def test_a_healthy_server_gets_no_sentence(healthy: Diagnosis) -> None:
    assert healthy.verdict == [] and "\nHEALTHY: " in str(healthy), str(healthy)


OTHER_DRAFTER = ("drafter of another target", "--speculative-draft-model-path")
CHATS = ("'raw prompts'", "/v1/chat/completions")
UNPAID: dict[str, Any] = {"pays": False, "causes": [{"cause": "drafter"}]}
LOAD = {"pays": False, "causes": [{"cause": "load", "remedy": "wait"}]}
STATES = ("12 of 48", "recurrent states", "--mamba-ssm-dtype", "--mem-fraction-static")


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (report(1.4), OTHER_DRAFTER),
        (report(1.4, None), OTHER_DRAFTER),
        (report(4.0), ("Likely cause: drafter.", "--speculative-draft-model-revision")),
        (report(4.0, drafting=known(float16=None)), ("float16", "--dtype bfloat16")),
        (report(drafting=known(float16=None)), ("float16", "--dtype bfloat16")),
        (report(1.4, drafting=known(drafter_older_than_target="2")), ("drafter older than target", "selector draft")),
        (report(4.0, drafting=known(quantised_drafter="fp8")), ("fp8", "--speculative-draft-model-quantization")),
        (report(4.0, template=False), ("no chat template", "--chat-template")),
        (report(template=False), ("no chat template", "--chat-template")),
        (report(drafting={"accept_length": 2.1}), CHATS),
        (report(drafting={"accept_length": 4.4}), ("'thinking off'", '"enable_thinking": true')),
        (report(drafting=LOAD), ("recent requests", "load. Fix: wait")),
        (report(drafting=UNPAID | {"accept_length": 2.1}), CHATS),
        (report(drafting=UNPAID, adaptive=True), ("recent requests", "Likely cause: drafter.")),
        (report(requests=requests("--mamba-ssm-dtype bfloat16")), STATES),
        (
            report(requests=requests("a narrower block"), launch_command="--max-mamba-cache-size 36"),
            ("use a larger --max-mamba-cache-size, a narrower block",),
        ),
    ],
)
def test_the_planted_cause_comes_first_with_its_fix(found: Diagnosis, named: tuple[str, ...]) -> None:
    assert all(part in found.verdict[0] for part in named), found.verdict
    assert ("\nLOW ACCEPTANCE: " if found.is_low else "\nPROBLEM: ") in str(found)


def test_at_most_three_sentences_likeliest_cause_first() -> None:
    drafting = known(quantised_target="fp8", drafter_of_another_target="its target is X", float16=None)
    sentences = report(4.0, drafting=drafting, requests=requests("less")).verdict
    assert len(sentences) == SENTENCES
    assert "float16" in sentences[0] and "its target is X" in sentences[1]


def test_a_published_drafter_is_recognised_by_the_end_of_its_path() -> None:
    found = find_reference("/models/Qwen3.5-4B-DFlash", 15)
    assert found is not None and found == find_reference("z-lab/Qwen3.5-4B-DFlash", 16)
    assert found.thinking and "huggingface.co" in found.source and found.source.endswith("block 16")
    assert found.lengths == pytest.approx({"math": (6.748 + 7.478) / 2, "code": (7.719 + 6.527) / 2, "chat": 5.933})


@pytest.mark.parametrize(
    ("target", "other"), [("/models/Qwen3.5-27B", "Qwen/Qwen3.5-4B"), ("Qwen/Qwen3.5-4B", None), ("/models/mine", None)]
)
def test_a_published_drafter_with_another_published_target_is_a_known_cause(target: str, other: str | None) -> None:
    pair = {"model_path": target, "speculative_draft_model_path": "z-lab/Qwen3.5-4B-DFlash"}
    assert Server(server_info() | pair).known == ({OTHER_TARGET: f"its target is {other}"} if other else {})


def test_replicas_and_groups_of_ranks_are_read_together() -> None:
    """Two of three have enough blocks; on the last one drafting does not pay."""
    cause = {"cause": "quantised target", "evidence": "fp8"}
    bad = {"pays": False, "accept_length": 1.5, "break_even": 1.5, "known": {"nan": "2"}, "causes": [cause]}
    unknown = {"pays": None, "accept_length": None, "break_even": 1.5, "known": {"fp8": None}}
    workers = [
        WORKER | {"copied_tokens": 3, "drafting": drafting, "steps_by_width": steps, "blocks_by_accept_length": blocks}
        for drafting, steps, blocks in (
            (WORKER["drafting"], {"16": 10}, {"4": 10}),
            (unknown, {}, {}),
            (bad, {"16": 5, "1": 2}, {"1": 20}),
        )
    ]
    info = server_info() | {"internal_states": [{"sglang_dflash": worker} for worker in workers]}
    server = Server(info)
    assert server.pays is False and server.recent_accept_length == (6.5 + 1.5) / 2
    assert server.known == {"nan": "2", "fp8": None} and "quantised target" in str(server.recent_cause)
    assert any("15 of width 16, 2 of width 1; 9 accepted" in fact for fact in server.facts)
    assert any(f"{60 / 30:.2f} tokens per verified block" in fact for fact in server.facts)
