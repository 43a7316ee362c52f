"""Turns of agents under a draft window: hits as long as without one, and the drafts of a window that was never cut.

Who holds which slot: ``tests/features/test_rings.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_dflash_lab.pairs import drafter_path
from tests.serving.test_weight_updates import tensors_of, update
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all
from tests.support.prompts import corpus
from tests.support.servers import (
    RANDOM_WIDTHS,
    RETRACTED,
    WINDOWED,
    Server,
    dflash_server,
    plain_server,
    with_plugin,
    with_refusals,
    worker_info,
)
from tests.worker.test_draft_window import PAGED, Case, assert_drafted, reference

pytestmark = pytest.mark.engine

NEW_TOKENS, TOOLS = 24, 300  # tokens of an answer, of the tools that all users share
Turn = list[tuple[list[int], Answer]]


def turns(server: Server, pair: str, number: int, users: int, *, serial: bool = False) -> list[Turn]:
    """Serve conversations of several users at once: tools, a question, and a result of a tool per turn, often long."""
    texts = corpus(pair, 8 * users, seed=5)
    tools = sum(texts[:8], [])[:TOOLS]
    prompts, served = [[*tools, *text] for text in texts[:users]], []
    for turn in range(number):
        at_once = users if turn and not serial else 1  # all but the first two users find the tools and their state
        answers = generate_all(server, prompts, at_once, NEW_TOKENS, return_logprob=True)
        served.append(list(zip(prompts, answers, strict=True)))
        results = (texts[users + (user * 7 + turn * 3) % (7 * users)] for user in range(users))
        prompts = [
            [*prompt, *answer.tokens, *result] for (prompt, answer), result in zip(served[-1], results, strict=True)
        ]
    return served


def cached(served: Sequence[Turn]) -> list[list[int]]:
    return [[answer.meta["cached_tokens"] for _, answer in turn] for turn in served]


def texts(served: Sequence[Turn]) -> list[list[list[int]]]:
    return [[answer.tokens for _, answer in turn] for turn in served]


def log_probabilities(served: Sequence[Turn]) -> list[float]:
    return [each[0] for turn in served for _, answer in turn for each in answer.meta["output_token_logprobs"]]


def assert_drafted_as_the_reference(case: Case, pair: str, served: Sequence[Turn], folder: Path) -> None:
    for prompt, answer in (each for turn in served for each in turn):
        assert_drafted(case, prompt, answer, folder, NEW_TOKENS, pair)


def test_a_hit_keeps_its_window(windowed_hybrid: Server) -> None:
    case = Case(64, "interleaved", WINDOWED)
    flush(windowed_hybrid)
    served = turns(windowed_hybrid, "tiny-hybrid", 3, 3)
    assert max(map(max, cached(served))) > 500
    assert_drafted_as_the_reference(case, "tiny-hybrid", served, windowed_hybrid.folder)


CHUNKED = ("--chunked-prefill-size", "128")
CASES = {
    "window 64": ("tiny-hybrid", Case(64)),
    "window 512": ("tiny-hybrid", Case(512)),
    "DFlash2": ("tiny-hybrid", Case(64, "dflash2")),
    "interleaved, pages and chunks": ("tiny-hybrid", Case(64, "interleaved", WINDOWED[2:-1])),
    "all layers slide": ("tiny-hybrid", Case(127, "swa")),
    "dense": ("tiny-dense", Case(64)),
    "pages of 16, chunks": ("tiny-hybrid", Case(512, "good", (*PAGED, *CHUNKED))),
    "pages of 64": ("tiny-hybrid", Case(64, "good", ("--page-size", "64"))),
    "no overlap": ("tiny-hybrid", Case(64, "good", ("--disable-overlap-schedule",))),
    "one snapshot": ("tiny-hybrid", Case(64, "good", ("--mamba-radix-cache-strategy", "extra_buffer_lazy"))),
    "random widths, copies": ("tiny-hybrid", Case(64, "good", RANDOM_WIDTHS)),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_eight_turns_of_six_agents(name: str, tmp_path: Path) -> None:
    pair, case = CASES[name]
    recorded = with_refusals(with_plugin(tmp_path, "drafts"))
    serial = CHUNKED[0] in case.others  # where chunks end depends on the order in which requests arrive
    with plain_server(pair, tmp_path, *(() if case.others == RANDOM_WIDTHS else case.others)) as server:
        plain = turns(server, pair, 8, 6, serial=serial)
    with dflash_server(pair, tmp_path, *case.others) as server:
        whole = turns(server, pair, 8, 6, serial=serial)
        assert worker_info(server)["window"] is None
    flags = case.others if case.drafter == "swa" else case.flags
    with dflash_server(pair, tmp_path, *flags, drafter=case.drafter, **recorded) as server:
        assert worker_info(server)["window"] == case.reads
        served = turns(server, pair, 8, 6, serial=serial)
        assert_nothing_leaked(server)
    assert texts(served) == texts(whole) == texts(plain)
    assert log_probabilities(served) == pytest.approx(log_probabilities(plain), abs=1e-4)
    if case.others != RANDOM_WIDTHS:  # which decide where an answer's last state is
        # a tail belongs to the end of a cached text: inside one, where only dense targets hit, there is none
        first = 1 if pair == "tiny-dense" else 0
        assert cached(served)[first:] == cached(whole)[first:]
        assert_drafted_as_the_reference(case, pair, served, tmp_path)


@pytest.mark.slow
def test_tails_leave_by_age_with_retractions_and_with_weights(tmp_path: Path) -> None:
    """One request's worth of tails for six users. Text and drafts are right; hits end early where a tail is gone."""
    flags, recorded = (*Case(64).flags, "--max-running-requests", "1"), with_refusals(with_plugin(tmp_path, "drafts"))
    with dflash_server("tiny-hybrid", tmp_path, *flags, **recorded) as server:
        assert_drafted_as_the_reference(Case(64), "tiny-hybrid", turns(server, "tiny-hybrid", 3, 6), tmp_path)
        assert (kept := worker_info(server)["tails"])["evicted"] and kept["slots"] <= kept["of"]
        [(prompt, answer)] = turns(server, "tiny-hybrid", 1, 1)[0]
        asked = [*prompt, *answer.tokens, *prompt[-80:]]
        response = update(server, tensors_of(drafter_path("tiny-hybrid", "good")), "draft", flush_cache=False)
        assert response.json()["success"], response.text
        assert worker_info(server)["tails"]["prefixes"] == 0
        served = [[(asked, generate(server, asked, NEW_TOKENS, return_logprob=True))]]
        assert_drafted_as_the_reference(Case(64), "tiny-hybrid", served, tmp_path)
        assert 0 < cached(served)[0][0] <= len(asked) - 64
    with dflash_server("tiny-hybrid", tmp_path, *Case(64).flags, **with_refusals(RETRACTED)) as server:
        served = turns(server, "tiny-hybrid", 4, 4)
        assert_nothing_leaked(server)
    assert texts(served) == [[reference("good").plain(p, NEW_TOKENS) for p, _ in turn] for turn in served]


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["tiny-dense", "tiny-hybrid"])
def test_a_sessions_next_turn_continues_its_ring(pair: str, tmp_path: Path) -> None:
    """SGLang keeps a dense target's K/V, and a hybrid's hits."""
    case, recorded = Case(64), with_refusals(with_plugin(tmp_path, "drafts"))
    parts, prompt, served = corpus(pair, 4, seed=5), [], []
    with dflash_server(pair, tmp_path, *case.flags, "--enable-streaming-session", **recorded) as server:
        session = server.post("/open_session", {"capacity_of_str_len": 10000, "streaming": True}).json()
        for part in (parts[0], *(part[-20:] for part in parts[1:])):  # a turn is shorter than the window
            prompt = [*prompt, *part]
            answer = generate(server, part, NEW_TOKENS, session_params={"id": session})
            served.append([(prompt, answer)])
            prompt = [*prompt, *answer.tokens]
    assert_drafted_as_the_reference(case, pair, served, tmp_path)
