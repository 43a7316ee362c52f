"""Can the GPU run the backends that were asked for? The rules are SGLang 0.5.23's, which checks some after loading.

They stand in its ``layers/attention/attention_registry.py`` and ``arg_groups/attention_hook.py``.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_dflash.check.findings import Finding, judge
from sglang_dflash.errors import DFlashError, Doubt
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.outside import default_backend
from sglang_dflash.plan.pair import flashinfer_states

# Backend -> major compute capabilities that can run it; the others run everywhere.
_MAJORS = {"fa3": {8, 9}, "fa4": {9, 10, 11}, "trtllm_mha": {9, 10, 12}}
_HYBRID_ON_BLACKWELL = {"triton", "trtllm_mha", "flashinfer", "fa4"}
_TARGET_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def check_backends(
    args: Any, machine: Machine, *, hybrid: bool, slides: bool = False, cuda: str | None = None
) -> Iterator[Finding]:
    """Findings on the backends of a command line.

    Args:
        args: server arguments by SGLang's names.
        machine: what serves; without a known compute capability there is nothing to check against.
        hybrid: whether the target has recurrent layers.
        slides: whether the drafter has sliding layers.
        cuda: the CUDA version of the torch that serves, if ``machine`` is this one; None if unknown.
    """
    if slides and _drafters(args) == "flashinfer":
        yield _waits(machine)
    flags = [*_TARGET_FLAGS, "speculative_draft_attention_backend"]
    asked = {flag: name for flag in flags if (name := getattr(args, flag))}
    if machine.capability is None:
        names = ", ".join(asked.values()) or "chosen by SGLang"
        known = f"{names}; not checked against {machine.name}: no compute capability is known"
        yield Finding("ok", "backends", known)
        return
    for flag, name in asked.items():
        option = "--" + flag.replace("_", "-")
        limited = hybrid and machine.is_blackwell and flag in _TARGET_FLAGS
        yield judge(option, _backend, option, name, machine.name, machine.capability, limited)
    if (fixed := flashinfer_states(args, machine)) is not None and args.mamba_ssm_dtype != "bfloat16":
        yield judge("recurrent state's dtype", _bfloat16_states, fixed, args.mamba_ssm_dtype, machine)
    prefill = args.linear_attn_prefill_backend or args.linear_attn_backend
    if machine.is_blackwell and prefill == "flashinfer":
        yield judge("torch's CUDA", _cuda_13, cuda if machine.told_by else None)


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built with, without importing torch; None if unknown."""
    found = importlib.util.find_spec("torch")
    places = found.submodule_search_locations if found else None
    if not places or not (source := Path(places[0], "version.py")).exists():
        return None
    version = re.search(r"^cuda\b[^=]*= '([\d.]+)'", source.read_text(encoding="utf-8"), re.MULTILINE)
    return version and version[1]


def _bfloat16_states(flag: str, dtype: str | None, machine: Machine) -> str:
    value = f"{flag} flashinfer on {machine.name} needs recurrent states in bfloat16"
    if dtype is not None:
        raise DFlashError(
            f"{value}, and --mamba-ssm-dtype is {dtype}",
            expected="--mamba-ssm-dtype bfloat16",
            remedy=f"set --mamba-ssm-dtype bfloat16, or {flag} triton",
        )
    raise Doubt(
        value,
        expected="--mamba-ssm-dtype bfloat16",
        remedy="none: the server sets it. Pass it explicitly to silence this warning",
    )


def _cuda_13(cuda: str | None) -> str:
    value, expected = "FlashInfer's linear prefill on this GPU", "a torch that is built for CUDA 13 or later"
    remedy = "install such a torch, or set --linear-attn-prefill-backend triton"
    if cuda is None:
        raise Doubt(f"{value} needs CUDA 13, and the server's torch is unknown", expected=expected, remedy=remedy)
    if int(cuda.partition(".")[0]) < 13:
        raise DFlashError(f"{value} needs CUDA 13, and torch has CUDA {cuda}", expected=expected, remedy=remedy)
    return cuda


def _drafters(args: Any) -> str | None:
    """The drafter's attention backend; None if SGLang chooses it."""
    asked = (args.speculative_draft_attention_backend, args.prefill_attention_backend, args.attention_backend)
    return next(filter(None, asked), None)


def _waits(machine: Machine) -> Finding:
    """FlashInfer's plan without waits is for one kind of layer (``flashinfer_backend.py``, ``dispatch_reason``)."""
    other = "fa3" if machine.capability is not None and machine.capability[0] in _MAJORS["fa3"] else "triton"
    return Finding(
        "warn",
        "drafter's attention backend",
        "flashinfer, for a drafter with sliding layers: the host waits for the device three times a step",
        expected="a backend that plans without waits",
        remedy=f"set --speculative-draft-attention-backend {other}",
    )


def _backend(option: str, name: str, gpu: str, capability: tuple[int, int], limited: bool) -> str:
    major, minor = capability
    if major in _MAJORS.get(name, {major}) and not (limited and name not in _HYBRID_ON_BLACKWELL):
        return f"{name} on {gpu}"
    best = default_backend(major)
    raise DFlashError(
        f"{option} {name} on {gpu} (compute capability {major}.{minor})",
        expected=f"a backend that this GPU can run: {best}, flashinfer or triton",
        remedy=f"set {option} {best}",
    )
