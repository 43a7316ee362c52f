"""Advised flags and proposals keep their promise: ``check`` with these flags gives the stated numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from sglang_dflash.check.advice import Load
from sglang_dflash.check.machine import GPUS, asked_about, highest_fraction
from sglang_dflash.check.memory import MemoryTable
from sglang_dflash.check.pools import Pools
from sglang_dflash.errors import Finding
from tests.support.configs import checked, memory_of, settings

NAME, GPU = "Qwen3.5-27B", asked_about(None, 141)
BLOCK = ("--speculative-num-draft-tokens", "16")
FLAGS = ("--mem-fraction-static", "0.75", *BLOCK, "--mamba-radix-cache-strategy", "extra_buffer")
OWN_RATIO = ("--mamba-full-memory-ratio", "0.89")  # SGLang's 0.9 stands for this package's division
FREEING = {"--mem-fraction-static", "--mamba-ssm-dtype"}


def memory(*flags: str) -> MemoryTable:
    return memory_of(NAME, *FLAGS, *OWN_RATIO, *flags, on=GPU)


def advised(*flags: str) -> dict[str, tuple[int, int]]:
    report = checked(NAME, *FLAGS, *OWN_RATIO, *flags, on=GPU)
    return {advice.flag: (advice.running, advice.tokens) for advice in report.advice}


@pytest.mark.parametrize(
    ("switch", "own"),
    [
        # a ring of records is no shorter for a block of 8
        ("0", {"--speculative-num-draft-tokens", "--mamba-full-memory-ratio"}),
        # one slot less is little compared with a state for every position; the default ratio is the best
        ("1", {"--mamba-radix-cache-strategy", "--mamba-full-memory-ratio"}),
    ],
    ids=["kept", "replayed"],
)
def test_an_advised_flag_lets_as_many_requests_run_as_stated(
    switch: str, own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_STATE_REPLAY", switch)
    advice = advised()
    assert {flag.split()[0] for flag in advice} == FREEING | own
    for flag, expected in advice.items():
        served = memory(*flag.split()).served
        assert (served.running, served.tokens) == expected, flag


@pytest.mark.parametrize(
    ("gpu", "died", "ran", "given"),
    [
        ("rtx3090", 0.85, 0.80, {"tp_size": 4, "speculative_num_draft_tokens": 8}),  # a user's blog, Qwen3.8-27B-FP8
        ("dgx-spark", 0.85, 0.80, {"chunked_prefill_size": 2048}),  # SGLang's cookbook
        ("rtx5090", 0.94, 0.91, {"chunked_prefill_size": 1024, "max_running_requests": 1}),  # the same
    ],
)
def test_no_fraction_is_proposed_at_which_servers_died(gpu: str, died: float, ran: float, given: Any) -> None:
    vocab, machine = 248_320, GPUS[gpu]
    highest = highest_fraction(machine, settings(**given), vocab)
    assert ran - 0.15 < highest <= ran < died
    for harder in ({"chunked_prefill_size": 32_768}, {"speculative_num_draft_tokens": 64, "max_running_requests": 64}):
        lower = highest_fraction(machine, settings(**{**given, **harder}), vocab)
        assert lower < highest or machine.is_unified


def test_all_requests_run_without_a_ratio() -> None:
    short = ("--context-length", "2048")  # a longer one takes the K/V that states for all would leave
    chosen = memory_of(NAME, *FLAGS, *short, on=GPU)
    assert chosen.other is not None and (chosen.served.running, chosen.other.running) == (48, 7)
    assert memory(*short, "--mamba-full-memory-ratio", "2.3").served.running < 48
    assert advised(*short)["--mamba-full-memory-ratio 0.9"][0] == 48


def loaded(name: str, load: Load, *flags: str) -> tuple[Finding, Pools]:
    found = checked(name, *BLOCK, *flags, load=load)
    assert found.memory is not None
    return found.findings[-1], found.memory.served


def proposals(finding: Finding) -> list[tuple[list[str], int, int]]:
    """Flags, tokens of K/V and contexts of every proposal in a remedy."""
    found = re.findall(r"(--.+?) \(([\d,]+) tokens of K/V, (\d+) contexts kept\)", finding.remedy)
    return [(flags.split(), int(tokens.replace(",", "")), int(contexts)) for flags, tokens, contexts in found]


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("Qwen3.5-27B", Load(48, 16_000, 0)),
        ("Qwen3.6-27B", Load(16, 8_000, 60)),
        ("Qwen3.5-4B", Load(8, 32_000, 60)),
        ("Qwen3.6-35B-A3B", Load(48, 16_000, 48)),
    ],
)
@pytest.mark.parametrize("own", [(), ("--mem-fraction-static", "0.75")], ids=["default", "cards'"])
def test_proposed_flags_serve_the_load(name: str, load: Load, own: tuple[str, ...]) -> None:
    finding, before = loaded(name, load, *own)
    enough = load.fits(before) and load.contexts_in(before) >= load.conversations
    assert (finding.level == "note") is enough
    if enough:
        return
    [(flags, tokens, contexts)] = proposals(finding)
    after, pools = loaded(name, load, *own, *flags)
    assert after.level == "note", after
    assert (pools.tokens, load.contexts_in(pools)) == (tokens, contexts)
    assert pools.running == load.users and tokens >= load.users * load.context and contexts >= load.conversations


def test_a_load_that_does_not_fit_is_answered_with_the_most_users_and_with_flags_that_would_serve_it() -> None:
    load = Load(48, 32_000, 0)
    finding, _ = loaded(NAME, load)
    assert finding.level == "warn" and finding.remedy.startswith("nothing serves them here: at most ")
    [most, *others] = proposals(finding)
    users = int(most[0][1])
    assert 1 < users < 48 and loaded(NAME, replace(load, users=users), *most[0])[0].level == "note"
    assert loaded(NAME, replace(load, users=users + 1))[0].remedy.startswith("nothing serves")
    assert [flags[0] for flags, _, _ in others] == ["--tp-size", "--kv-cache-dtype"]
    for flags, _, _ in others:
        assert loaded(NAME, load, *flags)[0].level == "note"
