"""Recurrent states are replayed, or SGLang's own worker serves for a reason of one table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError, Finding
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.old_flags import modernise_argv
from sglang_dflash.launch.plan import ServingPlan
from sglang_dflash.launch.rules import LATE, judge
from sglang_dflash.launch.settings import Settings
from sglang_dflash.launch.states import record_length
from tests.support import configs
from tests.support.cards import NAMES, card
from tests.support.configs import RULES, card_pair, launched
from tests.support.files import raise_first_error

FLAG = "--enable-linear-replayssm-spec"
NAMED = ("Qwen3.6-27B", "--speculative-num-draft-tokens", "16")


def settings(*flags: str) -> Settings:
    return parse(flags, target="t", drafter="d")[0]


def planned(name: str, *flags: str, on: Any = GPUS["h200"], hybrid: bool = True) -> ServingPlan:
    given = parse(flags, **card_pair(name))[0]
    return configs.planned(replace(Launch.of(given, on), sglangs_hybrid=hybrid))


LEFT = [
    ("--linear-attn-backend cutedsl", {}, "the linear-attention backend is cutedsl"),
    ("--linear-attn-decode-backend helion", {}, "the linear-attention backend is helion"),
    ("--enable-linear-replayssm", {}, "--enable-linear-replayssm keeps separate records"),
    (f"{FLAG} --enable-unified-memory", {}, "--enable-unified-memory allocates no records"),
    ("--disaggregation-mode prefill --enable-pd-role-switch", {}, "a prefill server with --enable-pd-role-switch"),
    ("", {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, "SGLANG_RAGGED_VERIFY_MODE=compact"),
]
REPLAYED = [
    ("", {}),
    (FLAG, {}),
    ("", {"SGLANG_RAGGED_VERIFY_MODE": "static"}),
    ("--linear-attn-backend cutedsl --linear-attn-decode-backend flashinfer", {}),
    ("--disaggregation-mode decode --enable-hierarchical-cache --mamba-radix-cache-strategy no_buffer", {}),
    ("--disaggregation-mode decode --enable-pd-role-switch", {}),
    ("--max-running-requests 1 --mamba-ssm-dtype bfloat16 --page-size 16", {}),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_RAGGED_VERIFY_MODE", "SGLANG_MAMBA_SSM_DTYPE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("device", [CPU, GPUS["rtx5090"], GPUS["h200"], UNKNOWN_GPU], ids=lambda each: each.name)
@pytest.mark.parametrize(("flags", "variables"), REPLAYED)
def test_states_are_replayed_on_every_device(
    flags: str, variables: dict[str, str], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plan = planned(*NAMED, *flags.split(), on=device)
    assert (plan.replay, plan.records) == (True, 16)


def decision(launch: Launch) -> Finding:
    return next(found for found in judge(launch, LATE) if found.about == "recurrent states")


@pytest.mark.parametrize(("flags", "variables", "reason"), LEFT)
def test_sglangs_worker_serves_where_nothing_can_be_replayed_and_no_worker_on_a_cpu(
    flags: str, variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch = Launch.of(parse([*NAMED[1:], *flags.split()], **card_pair(NAMED[0]))[0], GPUS["h200"])
    found = decision(replace(launch, sglangs_hybrid=True))
    assert found.level == "builtin" and found.value.startswith(f"recurrent states cannot be replayed: {reason}")
    found = decision(replace(launch, sglangs_hybrid=True, device=CPU))
    assert found.level == "error" and reason in found.value
    assert decision(replace(launch, sglangs_hybrid=False)).level != "builtin"


def test_sglangs_worker_serves_recurrent_states_of_another_kind() -> None:
    launch = Launch.of(parse(NAMED[1:], **card_pair(NAMED[0]))[0], GPUS["h200"])
    found = decision(replace(launch, sglangs_hybrid=False, other_states=True))
    assert found.level == "builtin" and "not those of gated delta nets" in found.value


@pytest.mark.parametrize("flags", [(), ("--disaggregation-mode", "prefill", "--linear-attn-backend", "cutedsl")])
def test_a_target_without_recurrent_states_and_a_prefill_server_replay_nothing(flags: tuple[str, ...]) -> None:
    given = Launch.of(parse([*NAMED[1:], *flags], **card_pair(NAMED[0]))[0], GPUS["h200"])
    assert decision(replace(given, sglangs_hybrid=bool(flags))).level == "ok"
    plan = planned(*NAMED, *flags, hybrid=bool(flags))
    assert (plan.replay, plan.records, plan.state_dtype) == (False, 0, None)


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
def test_replayed_states_have_plain_decodings_dtype(
    flags: str, variable: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would make states of a replay float32, unless the flag names a dtype."""
    pytest.importorskip("sglang")
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", variable)
    given = parse([*NAMED[1:], *flags.split()], **card_pair(NAMED[0]))[0]
    declared = launched(given, GPUS["b200"], monkeypatch)
    assert declared["enable_linear_replayssm_spec"] and declared["mamba_ssm_dtype"] == dtype


@pytest.mark.parametrize(("words", "block", "expected"), [("", 16, 16), ("", 4, 16), ("", 17, 32), ("64", 16, 64)])
def test_a_block_fits_its_records(words: str, block: int, expected: int) -> None:
    flags = ("--speculative-num-draft-tokens", str(block), *(("--linear-replayssm-cache-len", words) if words else ()))
    assert record_length(Launch.of(settings(*flags), CPU)) == expected


@pytest.mark.parametrize("words", ["--linear-replayssm-cache-len 8", "--linear-replayssm-cache-len 48"])
def test_records_that_are_too_short_are_refused(words: str) -> None:
    with pytest.raises(DFlashError, match="is no power of two from 16, which blocks of 16 need"):
        given = parse([*NAMED[1:], *words.split()], **card_pair(NAMED[0]))[0]
        raise_first_error(judge(Launch.of(given, CPU), RULES))
