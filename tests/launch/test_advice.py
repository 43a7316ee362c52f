"""Advised flags keep their promise: ``check`` with these flags gives the stated numbers."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.check.machine import GPUS, asked_about
from sglang_dflash.check.memory import highest_fraction
from sglang_dflash.check.pools import Pools
from tests.support.configs import checked, drafter, launch_of, memory_of, target

NAME, GPU = "Qwen3.5-27B", asked_about(None, 141)
BLOCK = ("--speculative-num-draft-tokens", "16")
FLAGS = ("--mem-fraction-static", "0.75", *BLOCK, "--mamba-radix-cache-strategy", "extra_buffer")
OWN_RATIO = ("--mamba-full-memory-ratio", "0.89")  # SGLang's 0.9 stands for this package's division
BLOCKS = "speculative_num_draft_tokens"
FREEING = {"--mem-fraction-static", "--mamba-ssm-dtype"}


def memory(*flags: str) -> Pools:
    return memory_of(NAME, *FLAGS, *OWN_RATIO, *flags, on=GPU)


def advised(*flags: str) -> dict[str, tuple[int, int]]:
    report = checked(NAME, *FLAGS, *OWN_RATIO, *flags, on=GPU)
    return {advice.flag: (advice.running, advice.tokens) for advice in report.advice}


def test_an_advised_flag_lets_as_many_requests_run_as_stated() -> None:
    advice, own = advised(), {"--mamba-radix-cache-strategy", "--mamba-full-memory-ratio"}
    assert {flag.split()[0] for flag in advice} == FREEING | own
    for flag, expected in advice.items():
        served = memory(*flag.split())
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
    launch = launch_of(drafter(block_size=64), target(vocab_size=248_320), GPUS[gpu], **{BLOCKS: 16, **given})
    highest = highest_fraction(launch)
    assert ran - 0.15 < highest <= ran < died
    for harder in ({"chunked_prefill_size": 32_768}, {"speculative_num_draft_tokens": 64, "max_running_requests": 64}):
        assert highest_fraction(launch.changed(**harder)) < highest or launch.device.is_unified


def test_the_proposed_fraction_counts_the_block_of_the_drafter() -> None:
    sizes = target(vocab_size=248_320), GPUS["rtx3090"]
    by_default, by_flag, wider = (
        highest_fraction(launch_of(drafter(block_size=block), *sizes, **given))
        for block, given in ((8, {}), (16, {BLOCKS: 8}), (16, {}))
    )
    assert by_default == by_flag > wider


def test_all_requests_run_without_a_ratio() -> None:
    short = ("--context-length", "2048")  # a longer one takes the K/V that states for all would leave
    chosen = checked(NAME, *FLAGS, *short, on=GPU)
    assert chosen.memory and chosen.memory.running == 48
    assert memory(*short, "--mamba-full-memory-ratio", "2.3").running < 48
    assert advised(*short)["--mamba-full-memory-ratio 0.9"][0] == 48


def test_advice_to_groups_of_ranks_is_for_all_of_them() -> None:
    flags = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head")
    few = ("--max-mamba-cache-size", "40")
    advice = advised(*flags, *few)
    assert advice["--max-mamba-cache-size 240"][0] == 24
    for flag, expected in advice.items():
        served = memory(*flags, *few, *flag.split())
        assert (served.running, served.tokens) == expected, flag
