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

from sglang_dflash.causes import ENOUGH, FIXES
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.published import published_pairs
from sglang_dflash.drafter.template import TemplateTokens, template_tokens
from sglang_dflash.width import AdaptiveWidth, CostTable, FixedWidth, WidthPolicy
from sglang_dflash.worker.observe.drafting import (
    CHECK_SECONDS,
    QUIET_SECONDS,
    RECENT,
    Payoff,
    RecentBlocks,
    Traits,
    known_causes,
)
from sglang_dflash.worker.observe.metrics import StepRecord
from sglang_dflash_lab.pairs import target_path
from tests.support.prompts import corpus

START, END, THINK, THOUGHT = 1, 2, 4, 5
TEMPLATE = TemplateTokens(frozenset({START, END}), (THINK, THOUGHT))
PLAIN = [START, 9, 9, END, THINK, THOUGHT]
FIXED = FixedWidth(16)
WIDTHS = (1, 2, 4, 8, 16)
_numbers = itertools.count()


def request(prompt: Iterable[int] = PLAIN, output: Iterable[int] = (9,), **shown: Any) -> Any:
    """A greedy request in the template, without thoughts; ``shown`` overrides."""
    shown = {"lora_id": None, "grammar": None, "top_k": 1, "finished_reason": None, **shown}
    params = SimpleNamespace(top_k=shown.pop("top_k"))
    ids = {"origin_input_ids": array("q", prompt), "output_ids": array("q", output)}
    return SimpleNamespace(rid=str(next(_numbers)), sampling_params=params, **ids, **shown)


class Server:
    """A judgement, and steps for it to count."""

    def __init__(
        self,
        policy: WidthPolicy = FIXED,
        known: Iterable[str] = (),
        drafter: str = "mine",
        context: int | None = None,
    ) -> None:
        self.now, self.policy = 0.0, policy
        self.judge = Payoff(RecentBlocks(Traits(TEMPLATE, context), 64), known, drafter, 16, lambda: self.now)

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


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "sglang_dflash")

    def taken() -> list[str]:
        found = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        caplog.clear()
        return found

    return taken


BLAMED: dict[str, Callable[[], Any]] = {
    "no chat template": lambda: request([9] * 100),
    "thinking on": lambda: request([START, 9, 9, END, THINK]),
    "context beyond the drafter's": lambda: request([*PLAIN[:-2], *[9] * 995, END, THINK, THOUGHT]),
    "LoRA adapter": lambda: request(lora_id="a"),
    "grammar": lambda: request(grammar=object()),
    "sampling": lambda: request(top_k=1 << 30),
}


@pytest.mark.parametrize("cause", BLAMED)
def test_the_trait_of_badly_drafted_requests_is_named(cause: str, warnings: Callable[[], list[str]]) -> None:
    server = Server(context=1000)
    server.serve(request, 6)
    assert server.section()["pays"] and server.section()["causes"] == [] and warnings() == []
    server.serve(BLAMED[cause], 1, 1000)
    (line,) = warnings()
    assert line.startswith("WARNING DFLASH: drafting does not pay: accept length 1.")
    assert f"Most likely cause: {cause} (" in line and "first drafts accepted: 0%, without it 100%" in line
    assert FIXES[cause] in line
    server.serve(request, 6)
    (line,) = warnings()
    assert line.startswith("INFO DFLASH: drafting pays again: accept length ")
    traits = server.section()["traits"][cause]["first_drafts_accepted"]
    assert traits["with"] == 0 and traits["without"] == 1


def test_a_trait_of_good_requests_too_is_blamed_less(warnings: Callable[[], list[str]]) -> None:
    server = Server()
    server.serve(request, 6, 50)
    server.serve(BLAMED["sampling"], 6, 40)
    server.serve(BLAMED["sampling"], 1, 10)
    server.serve(lambda: request([9] * 100, top_k=1 << 30), 1, 1000)
    (line,) = warnings()
    assert "cause: no chat template (" in line and line.endswith("Other possible causes: sampling, drafter")


def test_a_trait_that_makes_no_difference_is_not_blamed() -> None:
    """Half of the requests are sampled, and all are drafted badly."""
    server = Server()
    for _ in range(5):
        server.serve(request, 1)
        server.serve(BLAMED["sampling"], 1)
    assert server.causes() == ["drafter"]


@pytest.mark.parametrize(
    ("make", "known", "expected"),
    [
        (request, (), ["drafter"]),
        (request, ("float16", "quantised target"), ["float16", "drafter", "quantised target"]),
        (BLAMED["no chat template"], ("quantised drafter",), ["quantised drafter", "no chat template", "drafter"]),
        (BLAMED["sampling"], (), ["drafter", "sampling"]),
        (BLAMED["thinking on"], (), ["drafter"]),  # no card to compare with
    ],
)
def test_without_a_comparison_suspicions_have_an_order(make: Callable[[], Any], known: Any, expected: Any) -> None:
    server = Server(known=known)
    server.serve(make, 1)
    assert server.causes() == expected


def test_drafts_that_are_not_finite_are_the_first_cause() -> None:
    server = Server(known=("float16",))
    server.serve(request, 1, broken=1)
    assert server.causes()[:2] == ["drafts not finite", "float16"]


def test_the_log_quotes_the_drafters_card(warnings: Callable[[], list[str]]) -> None:
    server = Server(drafter="/models/Qwen3.5-4B-DFlash")
    server.serve(request, 1)
    (line,) = warnings()
    assert "accept length 1.00 (one user gains from 1.57)" in line
    assert "; the card of z-lab/Qwen3.5-4B-DFlash states 5.933 to 7.719 (greedy, thinking enabled" in line
    assert 'Most likely cause: thinking off. Fix: send chat_template_kwargs: {"enable_thinking": true}' in line
    section = server.section()
    assert section["card"]["block"] == 16 and section["card"]["accept_length"]["math500"] == 7.478
    assert section["break_even"] == pytest.approx(1.57, abs=0.01), "by its own card"
    assert Server(drafter="Qwen3.6-35B-A3B-DFlash").section()["break_even"] == pytest.approx(2.43, abs=0.01)
    assert Server().section()["card"] is None and Server().section()["break_even"] == section["break_even"]
    thinks = Server(drafter="Qwen3.5-4B-DFlash")
    thinks.serve(request, 6)
    thinks.serve(BLAMED["thinking on"], 1, 1000)
    assert thinks.causes() == ["drafter"], "as on the card"
    for published in published_pairs().values():
        assert published["thinking"] is ("thinking enabled" in published["setup"] or None)


def test_one_warning_per_cause_and_hour(warnings: Callable[[], list[str]]) -> None:
    server = Server()
    server.serve(BLAMED["no chat template"], 1, ENOUGH // 8 - 1)
    assert server.section()["pays"] is None and warnings() == []
    server.serve(BLAMED["no chat template"], 1)
    assert len(warnings()) == 1
    server.now = QUIET_SECONDS - 1
    server.serve(BLAMED["no chat template"], 1)
    assert warnings() == []
    server.serve(request, 6)
    assert len(warnings()) == 1
    server.serve(BLAMED["no chat template"], 1, 1000)
    assert warnings() == [], "the same cause within the hour"
    server.now += CHECK_SECONDS
    server.serve(BLAMED["no chat template"], 1)
    assert len(warnings()) == 1
    server.serve(request, 2, 1000)
    warnings()
    server.serve(BLAMED["grammar"], 1, 1000)
    assert ["grammar" in line for line in warnings()] == [True], "another cause"


def test_old_traffic_fades_and_finished_requests_are_not_counted() -> None:
    server = Server()
    server.serve(lambda: request(finished_reason=object()), 1)
    assert server.section()["accept_length"] is None
    server.serve(request, 6, RECENT)
    server.serve(BLAMED["grammar"], 3, RECENT)
    assert server.section()["accept_length"] == pytest.approx(3, abs=0.1)


def rested(first_accepted: float, cost: Callable[[int, int], float]) -> AdaptiveWidth:
    """A policy that has chosen plain decoding for eight requests; its drafts are accepted that often."""
    policy = AdaptiveWidth(CostTable({(size, w): cost(size, w) for size in (1, 8) for w in WIDTHS}))
    for step in range(600):
        width = policy.width(8, 800)
        policy.observe(width, [1 + (width > 1 and (step + row) % 100 < 100 * first_accepted) for row in range(8)])
        policy.observe_time(8, width, 800, cost(8, width))
    assert policy.paused is not None
    return policy


def test_an_adaptive_width_is_judged_by_its_costs(warnings: Callable[[], list[str]]) -> None:
    policy = rested(0.1, lambda size, width: 1.0 + 0.2 * width)
    server = Server(policy)
    server.serve(request, 1, width=2)
    (line,) = warnings()
    assert "drafting does not pay: a block of 2 yields 1." in line and "takes 1.17 times as long as a plain" in line
    assert server.causes() == ["drafter"]
    section = server.section()
    assert section["pays"] is False and section["judged_by"] == "costs"
    assert section["break_even"] == pytest.approx(1.4 / 1.2, rel=0.05)


def test_a_high_load_is_named_before_the_drafter() -> None:
    policy = rested(0.6, lambda size, width: 1.0 + 0.01 * width if size == 1 else 1.0 * width)
    server = Server(policy)
    server.serve(request, 2, width=2)
    assert server.causes() == ["load", "drafter"]


def test_plain_steps_and_copies_are_not_counted() -> None:
    server = Server()
    server.serve(request, 1, width=1)
    copied = StepRecord(16, 2, 800, accept_lens=[9, 9], requests=[request(), request()], matched=[True, True])
    server.judge.count(copied, FIXED, 0)
    assert server.section()["accept_length"] is None


PAIR = "tiny-hybrid"


def test_the_tokens_of_a_targets_template(tmp_path: Path) -> None:
    found = template_tokens(ModelFiles(str(target_path(PAIR))), None)
    assert found == TEMPLATE
    assert template_tokens(ModelFiles(str(tmp_path)), None) == TemplateTokens()
    assert template_tokens(ModelFiles(str(target_path(PAIR))), "chatml") == TemplateTokens(), "SGLang's own"


def test_a_template_is_recognised_in_any_conversation() -> None:
    traits = Traits(template_tokens(ModelFiles(str(target_path(PAIR))), None), None)
    for prompt in corpus(PAIR, 24):
        assert traits.of(request(prompt), beyond=False) == {"thinking off"}
        # `continue_final_message` can make the prompt longer than the part that is read.
        assert "no chat template" not in traits.of(request([*prompt, *[9] * 500]), beyond=False)
    assert traits.of(request([9] * 500), beyond=False) == {"no chat template"}
    # With some templates the target itself begins the thought.
    assert "thinking on" in traits.of(request([START, 9, END, START, 9], [THINK, 9]), beyond=False)


@pytest.mark.parametrize("quantised", ["stored", "quantization"], ids=["dequantised at load", "in SGLang's layers"])
def test_a_quantised_drafter_is_a_known_cause(quantised: str) -> None:
    def known(**drafter: Any) -> frozenset[str]:
        plan: Any = SimpleNamespace(drafter=SimpleNamespace(**{"stored": None, "quantization": None, **drafter}))
        plain: Any = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32, quantization=None))
        return known_causes(plan, plain, plain)

    assert known(**{quantised: "fp8"}) == {"quantised drafter"} and known() == set()
