"""The benchmark against a real server of ours: its counts are the server's."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sglang_dflash.diagnose.client import Sampling
from sglang_dflash_lab.bench import metrics, results, runner
from sglang_dflash_lab.bench.known_pairs import find_pair
from sglang_dflash_lab.bench.modes import parse_modes
from sglang_dflash_lab.bench.session import Session
from sglang_dflash_lab.bench.settings import Settings
from tests.support.generation import answers
from tests.support.servers import Server

pytestmark = pytest.mark.engine

QUIET = Console(quiet=True)
MODE = "dflash:16"


def comparison(out: Path, url: str) -> Settings:
    pair = find_pair("tiny-hybrid", None, None)
    return Settings(
        pair=pair,
        modes=tuple(parse_modes(MODE)),
        tasks=("math", "code"),
        concurrencies=(1, 2),
        num_prompts=2,
        repeats=1,
        out=out,
        sampling=Sampling(64, thinking=pair.thinking),
        base_urls={MODE: url},
    )


def test_counts_are_the_servers_own(dflash_hybrid: Server, tmp_path: Path):
    Session(comparison(tmp_path, dflash_hybrid.url), QUIET).run()
    measured = results.read(tmp_path)
    assert len(measured.requests) == 8
    for request in measured.requests:
        assert sum(request.accepted_drafts) == request.verify_steps > 0
        assert len(request.output_ids) == request.completion_tokens
    # The worker counts the same blocks, and one more where the overlap scheduler launched a request's next step before
    # it saw that the request had finished.
    histogram = metrics.accepted_histogram(measured.requests)
    of_requests = Counter({length: count for length, count in enumerate(histogram, 1) if count})
    of_worker: Counter[int] = Counter()
    for run in measured.runs:
        assert run.worker is not None
        of_worker.update({int(n): int(count) for n, count in run.worker["blocks_by_accept_length"].items()})
    assert of_requests <= of_worker
    assert (of_worker - of_requests).total() <= len(measured.requests)
    assert metrics.mean_width(measured.runs) == 16


def test_meta_info_and_server_info_report_the_same_accept_lengths(dflash_hybrid: Server, tmp_path: Path):
    settings = replace(comparison(tmp_path, dflash_hybrid.url), tasks=("math",), concurrencies=(1,))
    Session(settings, QUIET).run()
    ours = results.read(tmp_path).requests
    prompts = [json.loads(line)["input_ids"] for line in (tmp_path / runner.PROMPTS).read_text().splitlines()]
    assert len(ours) == len(prompts) == 2

    dflash_hybrid.post("/flush_cache")  # starts the server's average anew
    _, before = accept_figures(dflash_hybrid)
    sampling = {"temperature": 0, "max_new_tokens": 64}
    metas = [answers(dflash_hybrid, [prompt], sampling)[0]["meta_info"] for prompt in prompts]
    assert [meta["completion_tokens"] / meta["spec_verify_ct"] for meta in metas] == pytest.approx(
        [meta["spec_accept_length"] for meta in metas]
    )
    macro = sum(meta["spec_accept_length"] for meta in metas) / len(metas)
    assert metrics.accept_length_macro(ours) == pytest.approx(macro)

    average, after = accept_figures(dflash_hybrid)
    blocks = after - before
    assert average == pytest.approx(sum(n * count for n, count in blocks.items()) / blocks.total())


def accept_figures(server: Server) -> tuple[float | None, Counter[int]]:
    """SGLang's average accept length since the last flush, and our worker's blocks by accept length, when idle."""
    seen = None
    while True:
        (state,) = server.get("/server_info").json()["internal_states"]
        blocks = Counter({int(n): c for n, c in state["sglang_dflash"]["blocks_by_accept_length"].items()})
        now = state.get("avg_spec_accept_length"), blocks
        if now == seen:
            return now
        seen = now
        time.sleep(0.2)
