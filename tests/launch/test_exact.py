"""Which servers are exact, and every reason that a server is not."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.check.report import Report
from sglang_dflash.errors import Finding
from sglang_dflash.launch.device import CPU
from sglang_dflash.launch.exact import reasons_against_exact
from sglang_dflash.launch.launch import Launch
from tests.support.configs import card_pair, checked

FLAG, TRITON = "--enable-deterministic-inference", ("--attention-backend", "triton")
DENSE, HYBRID, EXPERTS = "Qwen3.5-4B", "Qwen3.5-27B", "Qwen3.6-35B-A3B"


def finding(report: Report) -> Finding | None:
    return next((each for each in report.findings if each.about == "exact" and each.value), None)


def plan(name: str, *flags: str, **options: Any) -> Any:
    report = checked(name, FLAG, *flags, **options)
    assert report.plan is not None, report.findings
    return report.plan


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (HYBRID, TRITON),
        (EXPERTS, (*TRITON, "--moe-runner-backend", "triton")),
        (HYBRID, ("--prefill-attention-backend", "triton", "--decode-attention-backend", "triton")),
        (HYBRID, (*TRITON, "--linear-attn-verify-backend", "triton", "--kv-cache-dtype", "bfloat16")),
        (HYBRID, (*TRITON, "--speculative-adaptive", "--speculative-draft-window-size", "4096")),
    ],
)
def test_exact(name: str, flags: tuple[str, ...]) -> None:
    report = checked(name, FLAG, *flags)
    found = finding(report)
    assert report.plan is not None and found is not None
    assert report.plan.exact and report.plan.describe()["exact"] is True
    assert found.level == "ok" and "bit-identical" in found.value


@pytest.mark.parametrize(
    ("name", "flags", "keys", "reason"),
    [
        (HYBRID, (), {}, "SGLang's choice"),
        (HYBRID, ("--attention-backend", "fa3"), {}, "fa3"),
        (HYBRID, (*TRITON, "--prefill-attention-backend", "fa3"), {}, "fa3, triton"),
        (HYBRID, (*TRITON, "--linear-attn-backend", "flashinfer"), {}, "linear-attention backend is flashinfer"),
        (HYBRID, (*TRITON, "--linear-attn-verify-backend", "flashinfer"), {}, "linear-attention backend is flashinfer"),
        (HYBRID, (*TRITON, "--enable-linear-replayssm"), {}, "decodes with another kernel"),
        (HYBRID, (*TRITON, "--dtype", "float32"), {}, "the dtype is float32"),
        (HYBRID, (*TRITON, "--dtype", "float16"), {}, "the dtype is float16"),
        (HYBRID, (*TRITON, "--quantization", "fp8"), {}, "quantised (fp8)"),
        (HYBRID, (*TRITON, "--kv-cache-dtype", "fp8_e4m3"), {}, "fp8_e4m3"),
        (HYBRID, (*TRITON, "--enable-mixed-chunk"), {}, "--enable-mixed-chunk"),
        (HYBRID, (*TRITON, "--enable-lora"), {}, "LoRA"),
        (HYBRID, (*TRITON, "--tp-size", "2"), {}, "--tp-size 2"),
        (HYBRID, (*TRITON, "--bf16-gemm-backend", "gemv"), {}, "gemv"),
        (EXPERTS, TRITON, {}, "the MoE runner is auto"),
        (DENSE, TRITON, {"kv_lora_rank": 512}, "MLA"),
        (DENSE, TRITON, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (DENSE, TRITON, {"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_a_reason_against(name: str, flags: tuple[str, ...], keys: dict[str, Any], reason: str) -> None:
    settings = parse((FLAG, *flags), **card_pair(name))[0]
    launch = Launch.of(settings, GPUS["h200"])
    vars(launch)["text"] = {**launch.text, **keys}
    [found] = reasons_against_exact(launch)
    assert reason in found


def test_every_reason_is_in_one_warning_and_in_the_plan() -> None:
    report = checked(HYBRID, FLAG, "--attention-backend", "fa3", "--tp-size", "2")
    found = finding(report)
    assert report.plan is not None and found is not None and not report.plan.exact
    assert found.level == "warn" and "fa3" in found.value and "--tp-size 2" in found.value
    assert report.plan.describe()["exact"] == "; ".join(report.plan.inexact)


def test_records_in_another_dtype_cannot_be_replayed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    assert not plan(HYBRID, *TRITON, "--enable-linear-replayssm-spec").exact


def test_the_cpu_platform_needs_no_backend() -> None:
    assert plan(EXPERTS, "--device", "cpu", on=CPU).exact


@pytest.mark.parametrize(("flags", "switch"), [((), ""), ((FLAG,), "0")])
def test_only_with_the_flag_and_without_the_switch(
    flags: tuple[str, ...], switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH_EXACT", switch)
    report = checked(HYBRID, *flags, *TRITON)
    assert finding(report) is None
    assert report.plan is not None and not report.plan.exact and report.plan.describe()["exact"] is False
