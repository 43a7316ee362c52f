"""Whether drafting pays: causes are found by comparison, and logged once per cause and hour."""

from __future__ import annotations

import itertools
import json
import logging
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.causes import COMPARED, ENOUGH, FIXES
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.published import published_pairs
from sglang_dflash.drafter.template import TemplateTokens, template_tokens
from sglang_dflash.width import AdaptiveWidth, CostTable, FixedWidth, WidthPolicy
from sglang_dflash.worker.observe import drafting
from sglang_dflash.worker.observe.drafting import Payoff, RecentBlocks, known_causes, other_target, traits_of
from sglang_dflash.worker.observe.metrics import StepRecord
from sglang_dflash_lab.pairs import target_path
from tests.support.prompts import corpus

START, END, THINK, THOUGHT = 1, 2, 4, 5
TEMPLATE = TemplateTokens(frozenset({START, END}), (THINK, THOUGHT))
PLAIN = [START, 9, 9, END, THINK, THOUGHT]
FIXED = FixedWidth(16)
_numbers = itertools.count()


def request(prompt: Iterable[int] = PLAIN, output: Iterable[int] = (9,), **shown: Any) -> Any:
    """A greedy request in the template, without thoughts; ``shown`` overrides."""
    shown = {"lora_id": None, "grammar": None, "top_k": 1, "finished_reason": None, **shown}
    params = SimpleNamespace(top_k=shown.pop("top_k"))
    ids = {"origin_input_ids": array("q", prompt), "output_ids": array("q", output)}
    return SimpleNamespace(rid=str(next(_numbers)), sampling_params=params, **ids, **shown)


class Server:
    """A judgement, steps for it to count, and the lines that it logs."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "sglang_dflash")
        self.now, self._records = 0.0, caplog
        self.judging()

    def judging(self, policy: WidthPolicy = FIXED, known: Iterable[str] = (), drafter: str = "mine") -> Server:
        recent = RecentBlocks(TEMPLATE, 1000, 64)
        self.policy = policy
        self.judge = Payoff(recent, dict.fromkeys(known), drafter, 16, lambda: self.now)
        return self

    def serve(self, make: Callable[[], Any], length: int, steps: int = 100, width: int = 16, broken: int = 0) -> None:
        """Eight new requests for some steps."""
        requests = [make() for _ in range(8)]
        for _ in range(steps):
            record = StepRecord(width, 8, 800, accept_lens=[length] * 8, requests=requests)
            self.judge.count(record, self.policy, broken)

    def causes(self) -> list[str]:
        return [cause["cause"] for cause in self.section()["causes"]]

    def section(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(self.judge.section(self.policy)))
        return found

    def lines(self) -> list[str]:
        """Lines logged since the last call."""
        found = [f"{record.levelname} {record.getMessage()}" for record in self._records.records]
        self._records.clear()
        return found


@pytest.fixture
def server(caplog: pytest.LogCaptureFixture) -> Server:
    return Server(caplog)


BLAMED: dict[str, Callable[[], Any]] = {
    "no chat template": lambda: request([9] * 100),
    "thinking on": lambda: request([START, 9, 9, END, THINK]),
    "context beyond the drafter's": lambda: request([*PLAIN[:-2], *[9] * 995, END, THINK, THOUGHT]),
    "LoRA adapter": lambda: request(lora_id="a"),
    "grammar": lambda: request(grammar=object()),
    "sampling": lambda: request(top_k=1 << 30),
}


@pytest.mark.parametrize("cause", BLAMED)
def test_the_trait_of_badly_drafted_requests_is_named(cause: str, server: Server) -> None:
    server.serve(request, 6)
    assert server.section()["pays"] and server.section()["causes"] == [] and server.lines() == []
    server.serve(BLAMED[cause], 1, 1000)
    (line,) = server.lines()
    assert line.startswith("WARNING DFLASH: drafting does not pay: accept length 1.")
    assert f"Most likely cause: {cause} (" in line and "first drafts accepted: 0%, without it 100%" in line
    assert FIXES[cause] in line
    server.serve(request, 6)
    (line,) = server.lines()
    assert line.startswith("INFO DFLASH: drafting pays again: accept length ")
    traits = server.section()["traits"][cause]["first_drafts_accepted"]
    assert traits["with"] == 0 and traits["without"] == 1


def test_a_trait_of_good_requests_too_is_blamed_less(server: Server) -> None:
    server.serve(request, 6, 50)
    server.serve(BLAMED["sampling"], 6, 40)
    server.serve(BLAMED["sampling"], 1, 10)
    server.serve(lambda: request([9] * 100, top_k=1 << 30), 1, 1000)
    (line,) = server.lines()
    assert "cause: no chat template (" in line and line.endswith("Other possible causes: sampling, drafter")


@pytest.mark.parametrize(
    ("makes", "known", "expected"),
    [
        ([request], (), ["drafter"]),
        ([request], ("float16", "quantised target"), ["drafts not finite", "float16", "drafter", "quantised target"]),
        ([BLAMED["no chat template"]], ("quantised drafter",), ["quantised drafter", "no chat template", "drafter"]),
        ([BLAMED["sampling"]], (), ["drafter", "sampling"]),
        ([BLAMED["thinking on"]], (), ["drafter"]),  # no card to compare with
        ([request, BLAMED["sampling"]] * 5, (), ["drafter"]),  # half of the requests are sampled, all are rejected
    ],
)
def test_without_a_difference_suspicions_have_an_order(makes: Any, known: Any, expected: Any, server: Server) -> None:
    server.judging(known=known)
    for make in makes:
        server.serve(make, 1, broken="drafts not finite" in expected)
    assert server.causes() == expected


def test_the_log_quotes_the_drafters_card(server: Server) -> None:
    server.judging(drafter="/models/Qwen3.5-4B-DFlash").serve(request, 1)
    (line,) = server.lines()
    assert "accept length 1.00 (one user gains from 1.57)" in line
    assert "; the card of z-lab/Qwen3.5-4B-DFlash states 5.933 to 7.719 (greedy, thinking enabled" in line
    assert 'Most likely cause: thinking off. Fix: send chat_template_kwargs: {"enable_thinking": true}' in line
    section = server.section()
    assert section["card"]["block"] == 16 and section["card"]["accept_length"]["math500"] == 7.478
    assert section["break_even"] == pytest.approx(1.57, abs=0.01), "by its own card"
    server.judging(drafter="Qwen3.5-4B-DFlash").serve(request, 6)
    server.serve(BLAMED["thinking on"], 1, 1000)
    assert server.causes() == ["drafter"], "as on the card"
    for card in published_pairs().values():
        assert card["thinking"] is ("thinking enabled" in card["setup"] or None)
    other = server.judging(drafter="Qwen3.6-35B-A3B-DFlash").section()
    assert other["break_even"] == pytest.approx(2.43, abs=0.01)
    unknown = server.judging().section()
    assert unknown["card"] is None and unknown["break_even"] == section["break_even"]


def test_one_warning_per_cause_and_hour(server: Server) -> None:
    server.serve(BLAMED["no chat template"], 1, ENOUGH // 8 - 1)
    assert server.section()["pays"] is None and server.lines() == []
    server.serve(BLAMED["no chat template"], 1)
    assert len(server.lines()) == 1
    server.now = drafting.QUIET_SECONDS - 1
    server.serve(BLAMED["no chat template"], 1)
    assert server.lines() == []
    server.serve(request, 6)
    assert len(server.lines()) == 1
    server.serve(BLAMED["no chat template"], 1, 1000)
    assert server.lines() == [], "the same cause within the hour"
    server.now += drafting.CHECK_SECONDS
    server.serve(BLAMED["no chat template"], 1)
    assert len(server.lines()) == 1
    server.serve(request, 2, 1000)
    server.lines()
    server.serve(BLAMED["grammar"], 1, 1000)
    assert ["grammar" in line for line in server.lines()] == [True], "another cause"


def test_plain_steps_copies_and_finished_requests_are_not_counted_and_old_traffic_fades(server: Server) -> None:
    server.serve(request, 1, width=1)
    server.serve(lambda: request(finished_reason=object()), 1)
    copied = StepRecord(16, 2, 800, accept_lens=[9, 9], requests=[request(), request()], matched=[True, True])
    server.judge.count(copied, FIXED, 0)
    assert server.section()["accept_length"] is None
    server.serve(request, 6, drafting.RECENT)
    server.serve(BLAMED["grammar"], 3, drafting.RECENT)
    assert server.section()["accept_length"] == pytest.approx(3, abs=0.1)


def paused(accepted: float, cost: Callable[[int, int], float]) -> AdaptiveWidth:
    """A policy that has paused drafting, after 600 steps of eight requests."""
    policy = AdaptiveWidth(CostTable({(size, w): cost(size, w) for size in (1, 8) for w in (1, 2, 4, 8, 16)}))
    for step in range(600):
        width = policy.width(8, 800)
        policy.observe(width, [1 + (width > 1 and (step + row) % 100 < 100 * accepted) for row in range(8)])
        policy.observe_time(8, width, 800, cost(8, width))
    assert policy.paused is not None
    return policy


def test_a_warning_waits_until_a_trait_can_be_compared(server: Server) -> None:
    server.judging(AdaptiveWidth(CostTable({(1, w): 1.0 for w in (1, 16)}))).serve(request, 6, 50)
    server.policy = paused(0.1, lambda size, width: 1.0 + 0.2 * width)
    server.serve(BLAMED["no chat template"], 1, COMPARED // 8 - 1)
    assert server.section()["pays"] is False and server.lines() == []
    server.serve(BLAMED["no chat template"], 1, 1)
    (line,) = server.lines()
    assert "Most likely cause: no chat template (" in line


@pytest.mark.parametrize(
    ("accepted", "cost", "causes"),
    [
        (0.1, lambda size, width: 1.0 + 0.2 * width, ["drafter"]),
        (0.6, lambda size, width: 1.0 + 0.01 * width if size == 1 else 1.0 * width, ["load", "drafter"]),
    ],
    ids=["few drafts are accepted", "high load"],
)
def test_an_adaptive_width_is_judged_by_its_costs(
    accepted: float, cost: Callable[[int, int], float], causes: list[str], server: Server
) -> None:
    policy = paused(accepted, cost)
    server.judging(policy).serve(request, 1, width=2)
    (line,) = server.lines()
    assert "drafting does not pay: a block of 2 yields 1." in line and "times as long as a plain step" in line
    section = server.section()
    assert section["pays"] is False and section["judged_by"] == "costs" and server.causes() == causes
    assert section["break_even"] == pytest.approx(cost(8, 2) / cost(8, 1), rel=0.05)


PAIR = "tiny-hybrid"


def test_a_template_is_recognised_in_any_conversation(tmp_path: Path) -> None:
    files = ModelFiles(str(target_path(PAIR)))
    assert template_tokens(files, None) == TEMPLATE
    assert template_tokens(ModelFiles(str(tmp_path)), None) == TemplateTokens()
    assert template_tokens(files, "chatml") == TemplateTokens(), "SGLang's own"
    for prompt in corpus(PAIR, 24):
        assert traits_of(request(prompt), TEMPLATE, beyond=False) == {"thinking off"}
        # `continue_final_message` can make the prompt longer than the part that is read.
        assert "no chat template" not in traits_of(request([*prompt, *[9] * 500]), TEMPLATE, beyond=False)
    assert traits_of(request([9] * 500), TEMPLATE, beyond=False) == {"no chat template"}
    # With some templates the target itself begins the thought.
    assert "thinking on" in traits_of(request([START, 9, END, START, 9], [THINK, 9]), TEMPLATE, beyond=False)


def test_models_show_causes_at_the_start() -> None:
    def known(drafter: str = "mine", dtype: torch.dtype = torch.bfloat16, **config: Any) -> dict[str, str | None]:
        settings = SimpleNamespace(**{"stored": None, "quantization": None, **config})
        plan: Any = SimpleNamespace(drafter=settings, files=SimpleNamespace(name=drafter))
        model = SimpleNamespace(dtype=dtype, quantization=None, model_path="/models/Qwen3.5-27B")
        runner: Any = SimpleNamespace(model_config=model)
        return known_causes(plan, runner, runner)

    assert known() == {} and known(dtype=torch.float16) == {"float16": None}
    assert known(stored=object()) == {"quantised drafter": "dequantised at load"}
    assert known(quantization="fp8") == {"quantised drafter": "fp8"}
    assert known("z-lab/Qwen3.5-4B-DFlash") == {"drafter of another target": "its target is Qwen/Qwen3.5-4B"}
    assert other_target("z-lab/Qwen3.5-4B-DFlash", "Qwen/Qwen3.5-4B") is None
    assert other_target("z-lab/Qwen3.5-4B-DFlash", "/models/mine") is None
