"""Attention backends against GPUs, as SGLang would refuse them after loading."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from sglang_dflash.check.flags import check_linear_backends, parse
from sglang_dflash.errors import Finding
from sglang_dflash.plan.device import CPU, UNKNOWN_GPU, Device
from sglang_dflash.plan.rules import check_backends
from sglang_dflash.plan.settings import Settings

HOPPER = Device("gpu", "NVIDIA H200", 141 << 30, (9, 0))
BLACKWELL = Device("gpu", "NVIDIA B200", 180 << 30, (10, 0))
WORKSTATION = Device("gpu", "NVIDIA RTX PRO 6000", 96 << 30, (12, 0))
AMPERE = Device("gpu", "NVIDIA A100", 80 << 30, (8, 0))


def options(*flags: str) -> Settings:
    return parse(flags, target="t", drafter="d")[0]


def backends(machine: Device, *flags: str, hybrid: bool = True) -> list[Finding]:
    return list(check_backends(options(*flags), machine, hybrid=hybrid))


def linear(machine: Device, *flags: str) -> list[Finding]:
    return list(check_linear_backends(options(*flags), machine, None))


@pytest.mark.parametrize(
    ("machine", "flag", "name", "fits"),
    [
        (HOPPER, "--attention-backend", "fa3", True),
        (AMPERE, "--attention-backend", "fa3", True),
        (BLACKWELL, "--attention-backend", "fa3", False),
        (WORKSTATION, "--attention-backend", "fa3", False),
        (BLACKWELL, "--attention-backend", "trtllm_mha", True),
        (HOPPER, "--attention-backend", "trtllm_mha", True),
        (AMPERE, "--attention-backend", "trtllm_mha", False),
        (BLACKWELL, "--speculative-draft-attention-backend", "fa4", True),
        (WORKSTATION, "--speculative-draft-attention-backend", "fa4", False),
        (AMPERE, "--attention-backend", "triton", True),
    ],
)
def test_a_backend_that_the_gpu_cannot_run_is_an_error(machine: Device, flag: str, name: str, fits: bool) -> None:
    (finding,) = backends(machine, flag, name)
    assert (finding.level == "ok") is fits
    if not fits:
        assert name in finding.value and machine.name in finding.value
        assert flag in finding.remedy


@pytest.mark.parametrize("machine", [CPU, UNKNOWN_GPU])
def test_without_a_known_gpu_backends_are_not_checked(machine: Device) -> None:
    assert [finding.level for finding in backends(machine, "--attention-backend", "fa3")] == ["ok"]


@pytest.mark.parametrize(
    ("flags", "slides", "machine", "instead"),
    [
        (("--speculative-draft-attention-backend", "flashinfer"), True, HOPPER, "fa3"),
        (("--attention-backend", "flashinfer"), True, BLACKWELL, "triton"),
        (("--attention-backend", "flashinfer"), True, UNKNOWN_GPU, "triton"),
        (("--attention-backend", "flashinfer"), False, HOPPER, None),
        (("--attention-backend", "flashinfer", "--speculative-draft-attention-backend", "fa3"), True, HOPPER, None),
        ((), True, HOPPER, None),
    ],
)
def test_flashinfer_for_a_drafter_with_sliding_layers_is_a_warning(
    flags: tuple[str, ...], slides: bool, machine: Device, instead: str | None
) -> None:
    found = list(check_backends(options(*flags), machine, hybrid=True, slides=slides))
    warnings = [finding.remedy for finding in found if "waits" in finding.value]
    assert warnings == ([f"set --speculative-draft-attention-backend {instead}"] if instead else [])


@pytest.mark.parametrize("flag", ["--linear-attn-verify-backend", "--linear-attn-decode-backend"])
def test_flashinfer_on_blackwell_needs_bfloat16_states(flag: str) -> None:
    """For a verify, with a Triton decode too."""
    flags = (flag, "flashinfer")
    assert [each.level for each in linear(BLACKWELL, *flags)] == ["note"]
    assert options(*flags).needs_bfloat16_states(BLACKWELL)  # the server sets it
    assert not any(options(*flags).needs_bfloat16_states(machine) for machine in (HOPPER, UNKNOWN_GPU))
    assert not options(*flags, "--mamba-ssm-dtype", "bfloat16").needs_bfloat16_states(BLACKWELL)
    assert linear(BLACKWELL, *flags, "--mamba-ssm-dtype", "bfloat16") == []
    [error] = linear(BLACKWELL, *flags, "--mamba-ssm-dtype", "float32")
    assert error.level == "error" and flag in error.value and "float32" in error.value
    assert linear(HOPPER, *flags) == []


@pytest.mark.parametrize(("cuda", "level"), [("12.9", "error"), ("13.0", "ok"), (None, "warn")])
@pytest.mark.parametrize("flag", ["--linear-attn-prefill-backend", "--linear-attn-backend"])
def test_flashinfers_linear_prefill_on_blackwell_needs_cuda_13(flag: str, cuda: str | None, level: str) -> None:
    args = options(flag, "flashinfer", "--mamba-ssm-dtype", "bfloat16")
    [finding] = check_linear_backends(args, replace(BLACKWELL, is_local=True), cuda)
    assert finding.level == level and (cuda or "unknown") in finding.value
    [elsewhere] = check_linear_backends(args, BLACKWELL, cuda)
    assert elsewhere.level == "warn"  # the torch of another machine
    assert not list(check_linear_backends(args, HOPPER, cuda))


@pytest.mark.sglang
def test_the_rules_of_linear_backends_are_sglangs() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.arg_groups import attention_hook

    source = " ".join(inspect.getsource(attention_hook.handle_linear_attn_backend).split())
    on_blackwell = "and get_platform().is_cuda and torch.cuda.get_device_capability()[0] >= 10"
    bfloat16 = f'== "flashinfer" and cfg.mamba_ssm_dtype != "bfloat16" {on_blackwell} ): raise ValueError'
    for rule in (
        "decode = cfg.linear_attn_decode_backend or cfg.linear_attn_backend",
        f"decode {bfloat16}",
        "verify = cfg.linear_attn_verify_backend",
        f"verify {bfloat16}",
        "prefill = cfg.linear_attn_prefill_backend or cfg.linear_attn_backend",
        f'prefill == "flashinfer" {on_blackwell} and cuda_major < 13 ): raise ValueError',
    ):
        assert rule in source
