"""A server keeps as many distinct prefixes of a hybrid target as ``sglang-dflash check`` says, and no more."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import asked_about
from sglang_dflash.plan.pools import Pools
from sglang_dflash.plan.report import preflight
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.generation import generate
from tests.support.pair_servers import dflash_server
from tests.support.servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAIR = "tiny-hybrid"
SLOTS = 20
SIZES = ("--max-mamba-cache-size", str(SLOTS), "--max-total-tokens", "30000", "--max-running-requests", "3")
TO_THE_END = {"ignore_eos": True}
STRATEGIES = ("extra_buffer", "extra_buffer_lazy", "no_buffer")


@dataclass(frozen=True)
class Kept:
    server: Server
    strategy: str
    predicted: Pools

    def stay(self, count: int, new_tokens: int = 8) -> bool:
        """Whether the first of ``count`` conversations, asked one after the other, is still cached at the end."""
        asked = [generate(self.server, prompt(i), new_tokens, sampling_params=TO_THE_END).tokens for i in range(count)]
        first = [*prompt(0), *asked[0]]
        return bool(generate(self.server, [*first, 5, 6], 1).meta["cached_tokens"])

    def most(self, running: int) -> int:
        """Prefixes that are kept while ``running`` others run: beside them and the one that asks, and its own."""
        return replace(self.predicted, running=running + 1).prefixes() + 1

    def flush(self) -> None:
        deadline = time.monotonic() + 60
        while self.server.post("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module", params=STRATEGIES)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    flags = ("--mamba-radix-cache-strategy", request.param, *SIZES)
    if request.param == "no_buffer":
        flags += ("--disable-overlap-schedule",)
    base = ("--dtype", "float32", "--skip-tokenizer-init")
    pair = {"target": str(target_path(PAIR)), "drafter": str(drafter_path(PAIR))}
    report = preflight(parse([*base, *flags], **pair)[0], asked_about("cpu", 64))
    assert report.memory is not None
    with dflash_server(PAIR, tmp_path_factory.mktemp("kept"), *flags, base=base) as server:
        yield Kept(server, request.param, report.memory.served)


def prompt(number: int, length: int = 130) -> list[int]:
    return [2 + (number * 131 + i * 7 + number * i % 11) % 900 for i in range(length)]


def test_the_tables_rows_are_those_of_the_servers_pools(kept: Kept) -> None:
    rows = dict(re.findall(r"^ +(additional prefixes kept|with \w+) +(\d+)$", kept.server.log, re.MULTILINE))
    fewer = {f"with {name}": each for name, each in (("extra_buffer_lazy", 4), ("no_buffer", 3))}
    own = kept.predicted.sizing.slots_per_request
    expected = {"additional prefixes kept": kept.predicted.prefixes()}
    expected |= {row: kept.predicted.prefixes(each) for row, each in fewer.items() if each < own}
    assert {row: int(count) for row, count in rows.items()} == expected
    assert (
        kept.predicted.prefixes()
        == SLOTS - 3 * {"extra_buffer": 4, "extra_buffer_lazy": 3, "no_buffer": 2}[kept.strategy]
    )


@pytest.mark.parametrize("running", [0, 2])
def test_one_prefix_more_evicts_the_first(kept: Kept, running: int) -> None:
    if kept.strategy == "no_buffer":
        pytest.skip("the end of an answer may be a prefix of its own: one or two a request, as below")
    most = kept.most(running)
    later = (
        running if kept.strategy == "extra_buffer_lazy" else 0
    )  # near a snapshot each takes the slot that it put off
    found = {}
    for count in (most - later, most + 1):
        kept.flush()
        with ThreadPoolExecutor(running + 1) as pool:
            long = [
                pool.submit(generate, kept.server, prompt(90 + i), 4000, sampling_params=TO_THE_END)
                for i in range(running)
            ]
            while running_now(kept.server) < running:
                time.sleep(0.1)
            found[count] = kept.stay(count)
            assert not any(each.done() for each in long)
            kept.server.post("/abort_request", {"rid": "", "abort_all": True})
    print(kept.strategy, running, found)
    assert list(found.values()) == [True, False], found


def test_a_turn_whose_answer_is_long_leaves_two_states(kept: Kept) -> None:
    """The prompt's and the answer's last, so that half as many conversations stay.

    With ``no_buffer`` the second one only if no draft was accepted beyond the end.
    """
    most, found = kept.most(0), {}
    for count in (most // 2, most + 1 if kept.strategy == "no_buffer" else most // 2 + 2):
        kept.flush()
        found[count] = kept.stay(count, new_tokens=150)
    print(kept.strategy, found)
    assert list(found.values()) == [True, False], found


def running_now(server: Server) -> int:
    return int(server.get("/v1/loads").json()["loads"][0]["num_running_reqs"])
