"""The plan of a replay: its records and dtype. Where none serves: ``findings.yaml``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.launch.device import CPU
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.states import record_length
from tests.support.configs import card_pair, launched, planned

NAMED = ("Qwen3.6-27B", "--speculative-num-draft-tokens", "16")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_RAGGED_VERIFY_MODE", "SGLANG_MAMBA_SSM_DTYPE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("flags", [(), ("--disaggregation-mode", "prefill", "--linear-attn-backend", "cutedsl")])
def test_a_target_without_recurrent_states_and_a_prefill_server_replay_nothing(flags: tuple[str, ...]) -> None:
    launch = Launch.of(parse([*NAMED[1:], *flags], **card_pair(NAMED[0]))[0], GPUS["h200"])
    plan = planned(replace(launch, sglangs_hybrid=bool(flags)))
    assert (plan.replay, plan.records, plan.state_dtype) == (False, 0, None)


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("gpu", "flags", "variable", "dtype"),
    [
        ("b200", "", "", "float32"),
        ("b200", "", "bfloat16", "bfloat16"),
        ("b200", "--mamba-ssm-dtype float32", "bfloat16", "float32"),
        ("b200", "--linear-attn-backend flashinfer", "", "bfloat16"),
        ("b200", "--linear-attn-verify-backend flashinfer", "", "bfloat16"),
        ("b200", "--linear-attn-decode-backend flashinfer --mamba-ssm-dtype float32", "", "float32"),
        ("h200", "--linear-attn-backend flashinfer", "", "float32"),
    ],
)
def test_replayed_states_have_plain_decodings_dtype(
    gpu: str, flags: str, variable: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would make states of a replay float32, unless the flag names a dtype."""
    pytest.importorskip("sglang")
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", variable)
    given = parse([*NAMED[1:], *flags.split()], **card_pair(NAMED[0]))[0]
    declared = launched(given, GPUS[gpu], monkeypatch)
    assert declared["enable_linear_replayssm_spec"] and declared["mamba_ssm_dtype"] == dtype


@pytest.mark.parametrize(("words", "block", "expected"), [("", 16, 16), ("", 4, 16), ("", 17, 32), ("64", 16, 64)])
def test_a_block_fits_its_records(words: str, block: int, expected: int) -> None:
    flags = ("--speculative-num-draft-tokens", str(block), *(("--linear-replayssm-cache-len", words) if words else ()))
    assert record_length(Launch.of(parse(flags, target="t", drafter="d")[0], CPU)) == expected
