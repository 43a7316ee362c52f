"""Which way to keep states a server will take, from its flags."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError
from sglang_dflash.hooks.flags import modernise_argv
from sglang_dflash.plan.device import CPU, UNKNOWN_GPU, Device
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.plan import KEPT_SHARE, replays
from sglang_dflash.plan.settings import Settings
from tests.support.cards import NAMES, card
from tests.support.configs import card_pair

SWITCH = "SGLANG_DFLASH_STATE_REPLAY"
FLAG = "--enable-linear-replayssm-spec"


MEMORY = 1 << 40  # of a device on which the requests' states take no sixth
NAMED = ("Qwen3.6-27B", "--speculative-num-draft-tokens", "16")


def settings(*flags: str) -> Settings:
    return parse(flags, target="t", drafter="d")[0]


def replayed(name: str, *flags: str, on: Device) -> bool:
    given = parse(flags, **card_pair(name))[0]
    return replays(given, Pair.of(given), on)


@pytest.mark.parametrize(
    ("flags", "switch", "few", "many"),
    [
        ([], "", False, True),
        ([FLAG], "", True, True),
        ([], "1", True, True),
        ([], "0", False, False),
        (["--linear-attn-backend", "cutedsl"], "", False, False),
        (["--linear-attn-backend", "cutedsl", "--linear-attn-decode-backend", "flashinfer"], "", False, True),
        (["--enable-linear-replayssm"], "", False, False),
        (["--disaggregation-mode", "prefill"], "", False, False),
    ],
)
def test_the_user_chooses_then_the_share_of_the_device_that_kept_states_need(
    flags: list[str], switch: str, few: bool, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    assert replayed(*NAMED, *flags, on=replace(GPUS["h200"], memory=MEMORY)) is few
    assert replayed(*NAMED, *flags, on=GPUS["h200"]) is replayed(*NAMED, *flags, on=CPU) is many


def test_the_share_is_requests_times_block_times_a_states_bytes() -> None:
    state = 48 * 48 * 128 * 128 * 4  # layers, heads, float32
    for flags, needed in {
        (): 48 * 16 * state,
        ("--max-running-requests", "9"): 9 * 16 * state,
        ("--mamba-ssm-dtype", "bfloat16"): 48 * 16 * state // 2,
        ("--tp-size", "2"): 48 * 16 * state // 2,
    }.items():
        at = int(needed / KEPT_SHARE)
        assert [replayed(*NAMED, *flags, on=Device("gpu", "any", at + more)) for more in (-100, 100)] == [True, False]
    assert not replayed(*NAMED, on=UNKNOWN_GPU)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_of_the_published_pairs_only_the_smallest_keep_their_states(gpu: str, name: str) -> None:
    flags = modernise_argv(card(name).arguments_for(**card_pair(name)))[0]
    assert replayed(name, *flags, on=GPUS[gpu]) is (name != "Qwen3.5-4B")


@pytest.mark.parametrize(("words", "block", "expected"), [("", 16, 16), ("", 4, 16), ("", 17, 32), ("64", 16, 64)])
def test_a_block_fits_its_records(words: str, block: int, expected: int) -> None:
    assert settings(*(("--linear-replayssm-cache-len", words) if words else ())).record_length(block) == expected


@pytest.mark.parametrize(
    ("words", "switch", "said"),
    [
        ("--linear-replayssm-cache-len 8", "", "a power of two, at least 16 for blocks of 16"),
        ("--linear-replayssm-cache-len 48", "", "a power of two, at least 16 for blocks of 16"),
        (FLAG, "0", "one of them"),
        ("", "yes", "0, 1, or unset"),
        ("--linear-attn-backend cutedsl", "1", "a server that can replay states"),
    ],
)
def test_a_contradiction_or_an_unknown_word_is_refused(
    words: str, switch: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    with pytest.raises(DFlashError, match=said):
        given = settings(*words.split())
        given.validate()
        given.record_length(16)
        given.replay_choice  # noqa: B018
