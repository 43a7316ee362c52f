"""How a server keeps recurrent states, from its flags: replayed, unless something in one table rules it out."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError, raise_first_error
from sglang_dflash.launch.asked import Launch
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU
from sglang_dflash.launch.old_flags import modernise_argv
from sglang_dflash.launch.plan import ServingPlan
from sglang_dflash.launch.rules import judge
from sglang_dflash.launch.settings import Settings
from sglang_dflash.launch.states import record_length
from tests.support import configs
from tests.support.cards import NAMES, card
from tests.support.configs import RULES, card_pair, launched

SWITCH = "SGLANG_DFLASH_STATE_REPLAY"
FLAG = "--enable-linear-replayssm-spec"
NAMED = ("Qwen3.6-27B", "--speculative-num-draft-tokens", "16")


def settings(*flags: str) -> Settings:
    return parse(flags, target="t", drafter="d")[0]


def planned(name: str, *flags: str, on: Any = GPUS["h200"], hybrid: bool = True) -> ServingPlan:
    given = parse(flags, **card_pair(name))[0]
    return configs.planned(replace(Launch.of(given, on), sglangs_hybrid=hybrid))


KEPT = [
    ("", {SWITCH: "0"}, f"{SWITCH}=0"),
    ("--linear-attn-backend cutedsl", {}, "the linear-attention backend is cutedsl"),
    ("--linear-attn-decode-backend helion", {}, "the linear-attention backend is helion"),
    ("--enable-linear-replayssm", {}, "--enable-linear-replayssm keeps separate records"),
    ("--disaggregation-mode prefill", {}, "--disaggregation-mode prefill: this server verifies nothing"),
    ("--enable-unified-memory", {}, "--enable-unified-memory allocates no records"),
    ("", {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, "SGLANG_RAGGED_VERIFY_MODE=compact"),
]
REPLAYED = [
    ("", {}),
    (FLAG, {}),
    ("", {SWITCH: "1", "SGLANG_RAGGED_VERIFY_MODE": "static"}),
    ("--linear-attn-backend cutedsl --linear-attn-decode-backend flashinfer", {}),
    ("--disaggregation-mode decode --enable-hierarchical-cache --mamba-radix-cache-strategy no_buffer", {}),
    ("--max-running-requests 1 --mamba-ssm-dtype bfloat16 --page-size 16", {}),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SWITCH, "SGLANG_RAGGED_VERIFY_MODE", "SGLANG_MAMBA_SSM_DTYPE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("device", [CPU, GPUS["rtx5090"], GPUS["h200"], UNKNOWN_GPU], ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("flags", "variables", "kept_by"), [*KEPT, *((flags, variables, None) for flags, variables in REPLAYED)]
)
def test_states_are_replayed_on_every_device_unless_the_table_names_a_reason(
    flags: str, variables: dict[str, str], kept_by: str | None, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plan = planned(*NAMED, *flags.split(), on=device)
    assert (plan.replay, plan.kept_by) == (kept_by is None, kept_by)
    assert plan.records == (16 if plan.replay else 0)


@pytest.mark.parametrize(("flags", "variables", "kept_by"), KEPT)
def test_a_replay_that_is_requested_and_ruled_out_is_refused(
    flags: str, variables: dict[str, str], kept_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for requests in [(FLAG, None), *([("", "1")] if SWITCH not in variables else [])]:
        if requests[1]:
            monkeypatch.setenv(SWITCH, requests[1])
        with pytest.raises(DFlashError) as caught:
            planned(*NAMED, *flags.split(), *requests[0].split())
        request = FLAG if requests[0] else f"{SWITCH}=1"
        assert caught.value.problem == f"{request}, but {kept_by}" and f"leave {request} out" in caught.value.remedy


def test_a_target_without_recurrent_states_has_neither() -> None:
    plan = planned(*NAMED, hybrid=False)
    assert (plan.replay, plan.kept_by, plan.records) == (False, None, 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_published_commands_replay(name: str) -> None:
    flags = modernise_argv(card(name).arguments_for(**card_pair(name)))[0]
    assert planned(name, *flags).replay


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("flags", "variable", "dtype"),
    [
        ("", "", "float32"),
        ("", "bfloat16", "bfloat16"),
        ("--mamba-ssm-dtype float32", "bfloat16", "float32"),
        ("--linear-attn-backend flashinfer", "", "bfloat16"),
    ],
)
def test_replayed_states_have_plain_decodings_dtype_and_kept_ones_are_logged_with_their_reason(
    flags: str, variable: str, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang would make states of a replay float32, unless the flag names a dtype."""
    pytest.importorskip("sglang")
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", variable)
    given = parse([*NAMED[1:], *flags.split()], **card_pair(NAMED[0]))[0]
    declared = launched(given, GPUS["b200"], monkeypatch)
    assert declared["enable_linear_replayssm_spec"] and declared["mamba_ssm_dtype"] == dtype
    with caplog.at_level(logging.INFO):
        declared = launched(replace(given, environ={SWITCH: "0"}), GPUS["b200"], monkeypatch)
    assert not declared.keys() & {"enable_linear_replayssm_spec", "mamba_ssm_dtype"}
    assert f"recurrent states: stored per draft token: {SWITCH}=0" in caplog.text


@pytest.mark.parametrize(("words", "block", "expected"), [("", 16, 16), ("", 4, 16), ("", 17, 32), ("64", 16, 64)])
def test_a_block_fits_its_records(words: str, block: int, expected: int) -> None:
    flags = ("--speculative-num-draft-tokens", str(block), *(("--linear-replayssm-cache-len", words) if words else ()))
    assert record_length(Launch.of(settings(*flags), CPU)) == expected


@pytest.mark.parametrize(
    ("words", "switch", "said"),
    [
        ("--linear-replayssm-cache-len 8", "", "is no power of two from 16, which blocks of 16 need"),
        ("--linear-replayssm-cache-len 48", "", "is no power of two from 16, which blocks of 16 need"),
        ("", "yes", "is not 0 or 1"),
    ],
)
def test_records_that_are_too_short_or_an_unknown_word_are_refused(
    words: str, switch: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    with pytest.raises(DFlashError, match=said):
        given = parse([*NAMED[1:], *words.split()], **card_pair(NAMED[0]))[0]
        raise_first_error(judge(Launch.of(given, CPU), RULES))
