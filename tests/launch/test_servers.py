"""Servers allocate the memory, and keep the prefixes, that ``sglang-dflash check`` predicts."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import asked_about
from sglang_dflash.check.pools import Pools, fit
from sglang_dflash.check.report import preflight
from sglang_dflash.launch.settings import OURS, SWITCH
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.families.pairs import build
from tests.support.generation import flush, generate
from tests.support.servers import RANDOM_WIDTHS, TRACKED, Server, running, with_plugin, worker_info

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZES = "--max-total-tokens 3000 --max-mamba-cache-size 60 --max-running-requests 8 --speculative-num-draft-tokens 12"
TOLERANCE = 0.001  # vectors that SGLang keeps in float32 in any dtype (A_log)


@contextlib.contextmanager
def started(
    folder: Path, models: dict[str, str], flags: list[str], *modes: str, **variables: str
) -> Iterator[tuple[Server, Pools]]:
    """A server whose plugin has these modes, and the pools that ``check`` predicts on a CPU with 64 GiB."""
    report = preflight(replace(parse(flags, **models)[0], environ=variables), asked_about("cpu", 64))
    assert report.memory is not None, report.findings
    draft = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", models["drafter"])
    variables = {**variables, **with_plugin(folder, *modes)}
    with running(folder, "--model-path", models["target"], *draft, *flags, **variables) as server:
        yield server, report.memory


DECODES = "--disaggregation-mode decode --disaggregation-transfer-backend fake"


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("tiny-dense", "--dtype float32"),
        ("tiny-hybrid", "--dtype bfloat16 --mamba-radix-cache-strategy extra_buffer"),
        ("tiny-moe", "--dtype float32 --mamba-ssm-dtype bfloat16"),
        ("tiny-dense", "--dtype float32 --speculative-draft-window-size 64 --page-size 16"),
        # A window that no sequence fills.
        ("tiny-dense", "--dtype float32 --speculative-draft-window-size 4096 --context-length 256"),
        ("tiny-hybrid", f"--dtype float32 {DECODES}"),
        ("tiny-dense", f"--dtype float32 --speculative-draft-window-size 64 {DECODES}"),
        ("tiny-dense", "--dtype float32 --tp-size 2"),
        ("tiny-hybrid dflash2", "--dtype float32"),
        ("tiny-hybrid dflash2", "--dtype float32 --tp-size 2"),
    ],
)
def test_a_server_allocates_the_memory_that_check_predicts(pair: str, words: str, tmp_path: Path) -> None:
    pair, _, drafter = pair.partition(" ")
    models = {"target": str(target_path(pair)), "drafter": str(drafter_path(pair, drafter or "good"))}
    with started(tmp_path, models, [*SIZES.split(), *words.split()], "memory") as (server, estimate):
        allocation, predicted = worker_info(server)["memory_bytes"], estimate.bytes
    if "--tp-size" in words:
        assert predicted["drafter_weights"] == allocation["drafter_weights"]
        return
    assert all(allocation[pool] for pool in ("target_kv", "draft_kv", "target_weights", "drafter_weights"))
    assert (allocation["states"] > 0) == (pair != "tiny-dense")
    assert allocation == {pool: pytest.approx(size, rel=TOLERANCE) for pool, size in predicted.items()}


PAIR = "tiny-hybrid"
MODELS = {"target": str(target_path(PAIR)), "drafter": str(drafter_path(PAIR))}
WINDOW = "--speculative-draft-window-size 64"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "thousandths", "words"),
    [
        (PAIR, 37, "--context-length 256"),  # SGLang's own division has more states
        (PAIR, 37, "--context-length 64"),
        (PAIR, 112, "--context-length 64"),
        (PAIR, 37, "--context-length 64 --speculative-draft-window-size 16"),
        (PAIR, 37, "--context-length 64 --mamba-full-memory-ratio 0.7"),
        (PAIR, 37, "--context-length 64 --tp-size 2"),  # the first rank measures twice as much: the least decides
        (PAIR, 37, f"--context-length 64 {DECODES}"),
        ("gpt_oss", 37, ""),
        ("gpt_oss", 37, f"--swa-full-tokens-ratio 0.3 --page-size 16 {WINDOW}"),
        ("gpt_oss", 37, f"--disable-radix-cache --chunked-prefill-size 256 {' '.join(RANDOM_WIDTHS)}"),
        ("gemma4_text", 37, "--max-total-tokens 3000"),
        ("deepseek_v3", 37, WINDOW),
    ],
)
def test_a_server_divides_free_memory_as_check_predicts(
    name: str, thousandths: int, words: str, tmp_path: Path
) -> None:
    """Of so many thousandths of a GiB: states or pools of a family, and what ends requests."""
    free, is_family = thousandths * (1 << 30) // 1000, name != PAIR
    models = {part: str(tmp_path / part) for part in MODELS} if is_family else MODELS
    if is_family:
        build(name, tmp_path)
    flags = ["--dtype", "float32", "--max-running-requests", "8" if is_family else "48", "--skip-tokenizer-init"]
    flags += words.split()
    variables = {SWITCH: OURS, "SGLANG_VLM_CACHE_SIZE_MB": "0"} if is_family else {}
    variables["SGLANG_DFLASH_TEST_FREE_BYTES"] = str(free)
    with started(tmp_path, models, flags, "free_bytes", "memory", **variables) as (server, estimate):
        worker, tokens = worker_info(server), server.get("/server_info").json()["max_total_num_tokens"]
    predicted = fit(estimate.sizing, free + estimate.sizing.weights)
    assert (worker["requests"]["running"], tokens) == (predicted.running, predicted.tokens)
    if not is_family:
        [slots] = set(re.findall(r"max_mamba_cache_size: (\d+)", server.log))
        assert int(slots) == predicted.state_slots
        return
    each, limit = predicted.kv.per_request(predicted.running)
    ended = f", limited by {limit}" if predicted.sliding_tokens else ""
    sliding = f", {predicted.sliding_tokens:,} in sliding layers" if predicted.sliding_tokens else ""
    assert f"K/V {predicted.tokens:,} tokens{sliding} ({each:,} per request{ended})" in server.log
    pools = [pool for pool in predicted.bytes if pool not in ("target_weights", "drafter_weights", "history")]
    assert {pool: worker["memory_bytes"][pool] for pool in pools} == {pool: predicted.bytes[pool] for pool in pools}


SLOTS = 20
OVERLAP = {"extra_buffer": 4, "extra_buffer_lazy": 3, "no_buffer": 2}  # slots of a running request without its prefix
TO_THE_END = {"ignore_eos": True}


@dataclass(frozen=True)
class PrefixServer:
    server: Server
    strategy: str
    predicted: Pools

    def keeps_first(self, count: int, new_tokens: int = 8) -> bool:
        """Send ``count`` conversations one after the other; return whether the first is still cached."""
        answers = [generate(self.server, prompt(i), new_tokens, sampling_params=TO_THE_END) for i in range(count)]
        again = [*prompt(0), *answers[0].tokens, 5, 6]
        return bool(generate(self.server, again, 1).meta["cached_tokens"])


@pytest.fixture(scope="module", params=OVERLAP)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixServer]:
    sizes = f"--max-mamba-cache-size {SLOTS} --max-total-tokens 30000 --max-running-requests 3"
    flags = ["--mamba-radix-cache-strategy", request.param, *sizes.split(), "--dtype", "float32", *TRACKED]
    if request.param == "no_buffer":
        flags.append("--disable-overlap-schedule")
    with started(tmp_path_factory.mktemp("kept"), MODELS, [*flags, "--skip-tokenizer-init"], "memory") as found:
        yield PrefixServer(found[0], request.param, found[1])


def prompt(number: int, length: int = 130) -> list[int]:
    return [2 + (number * 131 + i * 7 + number * i % 11) % 900 for i in range(length)]


def test_the_logged_prefixes_are_those_that_check_predicts(kept: PrefixServer) -> None:
    logged = re.search(r"([\d,]+) cached prefixes", kept.server.log)
    assert logged is not None and int(logged[1].replace(",", "")) == kept.predicted.prefixes
    assert kept.predicted.prefixes == SLOTS - 3 * OVERLAP[kept.strategy]


@pytest.mark.parametrize("running", [0, 2])
def test_one_prefix_more_evicts_the_first(kept: PrefixServer, running: int) -> None:
    if kept.strategy == "no_buffer":
        pytest.skip("the end of an answer may be a prefix too: one or two per request, as below")
    most = replace(kept.predicted, running=running + 1).prefixes + 1  # that of the current request included
    # Near a snapshot, a lazy request takes the slot that it has put off.
    later = running if kept.strategy == "extra_buffer_lazy" else 0
    found = {}
    for count in (most - later, most + 1):
        flush(kept.server)
        with ThreadPoolExecutor(running + 1) as pool:
            more = [prompt(90 + i) for i in range(running)]
            long = [pool.submit(generate, kept.server, each, 4000, sampling_params=TO_THE_END) for each in more]
            while kept.server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] < running:
                time.sleep(0.1)
            found[count] = kept.keeps_first(count)
            assert not any(each.done() for each in long)
            kept.server.post("/abort_request", {"rid": "", "abort_all": True})
    assert list(found.values()) == [True, False], found
