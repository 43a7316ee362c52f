"""Can the GPU run the backends that were asked for? The rules are SGLang 0.5.23's, which checks some after loading.

They stand in its ``layers/attention/attention_registry.py`` and ``arg_groups/attention_hook.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dflash.check.findings import Finding, judge
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.outside import default_backend
from sglang_dflash.plan.pair import needs_bfloat16_states

# Backend -> major compute capabilities that can run it; the others run everywhere.
_MAJORS = {"fa3": {8, 9}, "fa4": {9, 10, 11}, "trtllm_mha": {9, 10, 12}}
_HYBRID_ON_BLACKWELL = {"triton", "trtllm_mha", "flashinfer", "fa4"}
_TARGET_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def check_backends(args: Any, machine: Machine, *, hybrid: bool, slides: bool = False) -> Iterator[Finding]:
    """Findings on the backends of a command line.

    Args:
        args: server arguments by SGLang's names.
        machine: what serves; without a known compute capability there is nothing to check against.
        hybrid: whether the target has recurrent layers.
        slides: whether the drafter has sliding layers.
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
    if needs_bfloat16_states(args, machine):
        yield Finding(
            "warn",
            "recurrent state's dtype",
            f"FlashInfer's linear decode on {machine.name} keeps states in bfloat16 only",
            expected="--mamba-ssm-dtype bfloat16",
            remedy="none needed: the server sets it; say so yourself to silence this",
        )


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
