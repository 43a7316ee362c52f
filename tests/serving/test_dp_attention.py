"""DP attention: ranks that serve different requests and run every step together answer as plain decoding on one rank.

Each server records the width that every rank chose at every step, also where it had no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from sglang_dflash_lab.pairs import target_path
from tests.support.catalogue import PENALTIES, SCHEMA
from tests.support.checkpoints import untie
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate_all
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import FEATURES, RANDOM_WIDTHS, RETRACTED, Server, dflash_server, plain_server, with_plugin

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

NEW = 40
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "penalties": PENALTIES, "grammar": {"json_schema": SCHEMA}}
# Requests, how many at once, the rank of each (None leaves it to the server), and their kind.
LOADS: dict[str, tuple[int, int, Callable[[int], int | None], str]] = {
    "rank 1 is idle": (5, 2, lambda i: 0, "greedy"),
    "rank 0 is idle": (5, 2, lambda i: 1, "greedy"),
    "6 to 2": (16, 8, lambda i: int(i % 4 == 3), "greedy"),
    "15 to 1": (16, 16, lambda i: int(i == 5), "greedy"),
    "they come one after the other": (16, 3, lambda i: None, "greedy"),
    "with penalties": (5, 5, lambda i: i % 2, "penalties"),
    "with a grammar": (5, 5, lambda i: i % 2, "grammar"),
}


def ranks(number: int, groups: int) -> tuple[str, ...]:
    return ("--tp-size", str(number), "--attn-dp-size", str(groups), "--enable-dp-lm-head")


@dataclass(frozen=True)
class Case:
    pair: str
    flags: tuple[str, ...] = ()
    drafter: str = "good"
    block: int = 16
    ranks: int = 2
    groups: int = 2
    plugin: tuple[str, ...] = ("rounds",)
    environment: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "hybrid, fixed width, draft window": Case("tiny-hybrid", ("--speculative-draft-window-size", "64")),
    "hybrid, adaptive, weak drafter, ranks of different speed": Case(
        "tiny-hybrid", ("--speculative-adaptive",), "noisy", 32, plugin=("rounds", "skew_times")
    ),
    "mixture of experts, random widths, copies, retraction": Case(
        "tiny-moe", RANDOM_WIDTHS, "good", 32, environment=RETRACTED
    ),
    "mixture of experts, 4 ranks": Case("tiny-moe", RANDOM_WIDTHS, ranks=4, groups=4),
    "hybrid, groups of two ranks": Case("tiny-hybrid", RANDOM_WIDTHS, block=32, ranks=4),  # not with a tied LM head
}


@dataclass(frozen=True)
class Served:
    case: Case
    server: Server

    def steps(self) -> list[list[dict[str, Any]]]:
        """Return what each rank recorded of its steps, of one width each.

        Of the last step, which an end overtook, a rank's line may still be missing.
        """
        files = [self.server.folder / f"rounds-{rank}.jsonl" for rank in range(self.case.ranks)]
        found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        widths = [[step["width"] for step in rank] for rank in found]
        shortest = min(map(len, widths))
        assert shortest and max(map(len, widths)) <= shortest + 1
        assert all(each[:shortest] == widths[0][:shortest] for each in widths)
        return found


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("served")
    flags = (*ranks(case.ranks, case.groups), "--enable-metrics", *case.flags)
    if case.ranks > case.groups:
        flags += ("--model-path", str(untie(target_path(case.pair), folder / "target")))
    environment = {**case.environment, **with_plugin(folder, *case.plugin)}
    kind: dict[str, Any] = {"base": FEATURES, "drafter": case.drafter, "block": case.block}
    with dflash_server(case.pair, folder, *flags, **kind, **environment) as server:
        yield Served(case, server)


Expected = Callable[[str, str], list[list[int]]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return the tokens of a pair's target on one rank, by kind of request; without overlap for the penalties."""

    @cache
    def known(pair: str) -> dict[str, list[list[int]]]:
        folder = tmp_path_factory.mktemp("plain")
        flags, plugin = ("--disable-overlap-schedule",), with_plugin(folder, "penalty_order")
        with plain_server(pair, folder, *flags, base=FEATURES, **plugin) as server:
            asked = {kind: ask(server, prompts(pair), 8, lambda i: None, **params) for kind, params in KINDS.items()}
        return {kind: [answer.tokens for answer in answers] for kind, answers in asked.items()}

    return lambda pair, kind: known(pair)[kind]


def prompts(pair: str) -> list[list[int]]:
    return corpus(pair, 16, seed=21)


def ask(
    server: Server, inputs: list[list[int]], concurrency: int, rank: Callable[[int], int | None], **params: Any
) -> list[Answer]:
    return generate_all(server, inputs, concurrency, NEW, lambda i: {"routed_dp_rank": rank(i)}, sampling_params=params)


@pytest.mark.parametrize("load", LOADS)
def test_answers_are_plain_decodings_under_unequal_loads(load: str, served: Served, plain: Expected) -> None:
    number, concurrency, rank, kind = LOADS[load]
    flush(served.server)
    answers = ask(served.server, prompts(served.case.pair)[:number], concurrency, rank, **KINDS[kind])
    assert [answer.tokens for answer in answers] == plain(served.case.pair, kind)[:number]
    if kind == "greedy":
        assert max(answer.meta["spec_accept_length"] for answer in answers) > 1.2
    served.steps()


def test_seeded_requests_are_the_same_alone_and_among_others(served: Served) -> None:
    inputs, seeded = prompts(served.case.pair)[:4], {"temperature": 0.9, "sampling_seed": 7}
    alone = ask(served.server, inputs, 1, lambda i: 0, **seeded)
    others = ask(served.server, inputs, 4, lambda i: i % 2, **seeded)
    assert [answer.tokens for answer in others] == [answer.tokens for answer in alone]


def test_groups_draw_different_noise(served: Served) -> None:
    """Each group's first request without a seed."""
    inputs = random_prompts(served.case.pair, 1) * served.case.groups
    first, *others = ask(served.server, inputs, 1, lambda i: i, temperature=1.5, ignore_eos=True)
    assert all(other.tokens != first.tokens for other in others)


def test_all_ranks_chose_and_learned_the_same_and_nothing_leaked(served: Served) -> None:
    """The last test of each server."""
    case, steps = served.case, served.steps()
    assert_nothing_leaked(served.server)
    sections = [state["sglang_dflash"] for state in served.server.get("/server_info").json()["internal_states"]]
    assert all(sum(section["steps_by_width"].values()) for section in sections), "a group served nothing"
    assert all(any(step["requests"] == 0 for step in rank) for rank in steps), "no rank was idle"
    assert all(section["width"] == sections[0]["width"] for section in sections)
    metrics = served.server.get("/metrics").text
    counted = set(re.findall(r"^sglang_dflash:steps_total\{[^}]*dp_rank=\"(\d)\"", metrics, re.MULTILINE))
    assert counted == {str(group) for group in range(case.groups)}
    if case.flags == ("--speculative-adaptive",):
        assert len({step["width"] for step in steps[0]}) > 1
        assert sections[0]["width"]["costs"]["measured"] > 0
    if case.environment == RETRACTED:
        assert "etract" in served.server.log
    assert [section["requests"]["asked"] for section in sections] == [16 // case.groups] * case.groups
