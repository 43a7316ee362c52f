"""``--speculative-adaptive`` on a real server: drafting pauses where drafts are rejected, and resumes."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.train.hf import load_model
from tests.house.test_grafana import OURS, SGLANGS, series
from tests.support.checkpoints import assert_greedy
from tests.support.generation import assert_nothing_leaked, generate_all
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import Server, dflash_server, with_plugin, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 160
USERS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without copies, which would pay on the repetitions of a target that babbles.

    Steps take the plugin's times, so that a busy machine decides nothing.
    """
    folder = tmp_path_factory.mktemp("adaptive")
    plugin = with_plugin(folder, "times", "replays", "no_copies")
    with dflash_server(PAIR, folder, "--speculative-adaptive", drafter="noisy", **plugin) as server:
        yield server
        assert_nothing_leaked(server)


def metrics(server: Server) -> dict[str, float]:
    """Our series by name and own labels."""
    lines = re.findall(r"^sglang_dflash:(\w+)\{(.*)\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    found = {}
    for name, labels, value in lines:
        own = ",".join(sorted(label for label in labels.split(",") if not re.match("model_name|dp_rank|pid", label)))
        found[f"{name} {own}".strip()] = float(value)
    return found


def first_round(server: Server, prompts: list[list[int]], wanted: Callable[[float], bool], **sampling: Any) -> None:
    """Ask up to 24 times, until the answers that came last have a wanted mean width: positions verified per step.

    They equal the target's in transformers.
    """
    for _ in range(24):
        answers = generate_all(server, prompts, USERS, NEW_TOKENS, sampling_params=sampling)
        if wanted(statistics.mean(answer.meta["spec_cap_length"] for answer in answers[-USERS:])):
            target = load_model(target_path(PAIR))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert_greedy(target, prompt, answer.tokens)
            return
    raise AssertionError("no round has the wanted width")


def test_the_costs_at_the_start_are_those_of_steps_that_replay_states(server: Server) -> None:
    steps = map(json.loads, (server.folder / "replays.jsonl").read_text().splitlines())
    measured = {(step["requests"], step["width"]) for step in steps if step["rid"].startswith("dummy")}
    largest = worker_info(server)["width"]["costs"]["batch_sizes"][-1]
    assert measured >= {(1, 2), (1, 4), (1, 8), (1, 16), (largest, 16)}


def test_the_start_states_how_long_its_parts_took(server: Server) -> None:
    found = worker_info(server)["start_seconds"]
    parts = ["drafter", "pools", "drafter's graphs", "graphs of widths", "first calls", "calibration", "process"]
    assert [*found] == parts and found["drafter"] > 0 and found["calibration"] > 0
    assert sum(found.values()) <= 2 * found["process"], "the parts do not overlap"


def test_drafting_pauses_where_drafts_are_rejected_and_resumes(server: Server) -> None:
    """After random tokens the target babbles, and drafts are rejected."""
    first_round(server, random_prompts(PAIR, 16), lambda width: width < 1.5, ignore_eos=True)
    assert worker_info(server)["width"]["pauses"] > 0
    said = re.findall(r"DFLASH: drafting does not pay: a block of \d+ yields .* cause: (\w+)", server.log)
    assert said and set(said) <= {"drafter", "load"}, said
    drafting = worker_info(server)["drafting"]
    assert drafting["break_even"] > 1.5  # by costs
    assert metrics(server)["drafting_pays"] == drafting["pays"]
    first_round(server, corpus(PAIR, 16), lambda width: width > 2.5)
    changes = re.findall("DFLASH: drafting (pays again|does not pay)", server.log)
    assert changes == ["does not pay", "pays again"] * (len(changes) // 2) and worker_info(server)["drafting"]["pays"]


def test_metrics_show_widths_rates_and_survival(server: Server) -> None:
    generate_all(server, corpus(PAIR, 8), USERS, NEW_TOKENS)
    found, info = metrics(server), worker_info(server)
    assert found["width_count"] == sum(info["steps_by_width"].values())
    assert found["width_sum"] == sum(int(width) * count for width, count in info["steps_by_width"].items())
    assert found['tokens_per_ms kind="measured"'] > 0 and found['tokens_per_ms kind="predicted"'] > 0
    survival = [found[f'survival position="{j}"'] for j in range(1, 16)]
    assert survival == sorted(survival, reverse=True) and 0 < survival[0] <= 1
    assert found["drafting_pays"] in (0, 1)


def test_sglangs_own_figures_count_the_drafts_that_were_verified(server: Server) -> None:
    """And not fifteen at every step: the accept rate of the log line and of /metrics."""
    generate_all(server, [*corpus(PAIR, 16), *random_prompts(PAIR, 8)], USERS, NEW_TOKENS)
    line = r"accept len: ([\d.]+), accept rate: ([\d.]+), cap len: ([\d.]+)"
    found = [tuple(map(float, match)) for match in re.findall(line, server.log)]
    narrow = [(length, rate, width) for length, rate, width in found if 1.5 < width < 12]
    assert narrow, found
    for length, rate, width in narrow:
        assert rate == pytest.approx((length - 1) / (width - 1), abs=0.03)
    gauges = dict(re.findall(r"^sglang:spec_(\w+)\{.*\} (\S+)$", server.get("/metrics").text, re.MULTILINE))
    length, rate, width = (float(gauges[name]) for name in ("accept_length", "accept_rate", "cap_length"))
    assert rate * (width - 1) == pytest.approx(length - 1, abs=1e-6)  # the last interval may be plain decoding's
    [load] = server.get("/v1/loads?include=spec").json()["loads"]
    assert load["speculative"]["accept_rate"] == pytest.approx(rate, abs=1e-6)
    assert server.get("/server_info").json()["speculative_adaptive"] is True


def test_the_server_exports_the_series_of_the_dashboard(server: Server) -> None:
    for _ in range(2):  # the second time from the prefix cache; an answer must come in more than one part
        generate_all(server, corpus(PAIR, 2, 5), 2, NEW_TOKENS, sampling_params={"ignore_eos": True})
    exported = set(re.findall(r"^([\w:]+)\{", server.get("/metrics").text, re.MULTILINE))
    assert series(OURS, SGLANGS) <= exported
