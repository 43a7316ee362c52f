"""GPU-only choices of a command line, mapped to what serves them on a CPU, so that a command written for a GPU starts.

The mapping is data: one :class:`Choice` a server argument. Values that a CPU can serve pass through untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash_cpu.layers import ATTENTION_BACKEND


@dataclass(frozen=True)
class Choice:
    """One server argument on a CPU.

    Attributes:
        field: its name.
        instead: the value taken for every other that a CPU cannot serve.
        served_by: what serves the user's choice, for the warning.
        allowed: values that pass through, besides ``instead``.
    """

    field: str
    instead: Any
    served_by: str
    allowed: tuple[Any, ...] = ()


_ATTENTION = "torch attention"
_GDN = "the CPU platform's torch kernels"
_GLOO = "gloo"

CHOICES: tuple[Choice, ...] = (
    Choice("attention_backend", ATTENTION_BACKEND, _ATTENTION),
    Choice("prefill_attention_backend", None, _ATTENTION),
    Choice("decode_attention_backend", None, _ATTENTION),
    Choice("speculative_draft_attention_backend", ATTENTION_BACKEND, _ATTENTION, (None,)),
    # "triton" is upstream's name for the functions that our table replaces.
    Choice("linear_attn_backend", "triton", _GDN),
    Choice("linear_attn_prefill_backend", "triton", _GDN, (None,)),
    Choice("linear_attn_decode_backend", "triton", _GDN, (None,)),
    Choice("linear_attn_verify_backend", "triton", _GDN, (None,)),
    Choice("mamba_backend", "triton", _GDN, (None,)),
    Choice("enable_linear_replayssm", False, _GDN),
    Choice("sampling_backend", "pytorch", "torch"),
    Choice("moe_runner_backend", "auto", "torch experts", ("triton",)),
    Choice("moe_a2a_backend", "none", _GLOO, (None,)),
    Choice("bf16_gemm_backend", "torch", "torch", ("auto",)),
    Choice("flashinfer_allreduce_fusion_backend", None, _GLOO),
    Choice("enable_flashinfer_allreduce_fusion", False, _GLOO),
    Choice("enable_aiter_allreduce_fusion", False, _GLOO),
    Choice("enable_mscclpp", False, _GLOO),
    Choice("enable_nccl_nvls", False, _GLOO),
    Choice("enable_symm_mem", False, _GLOO),
    Choice("enable_torch_symm_mem", False, _GLOO),
    Choice("enable_torch_compile", False, "eager torch"),
)

# What these hold if the user said nothing; not worth a warning.
_UNSET = {("attention_backend", None), ("sampling_backend", None)}


def cpu_values(value_of: Callable[[str], Any]) -> tuple[dict[str, Any], list[str]]:
    """Server arguments to change, and a warning line for each that the user chose.

    Args:
        value_of: reads a server argument by name.
    """
    changes, warnings = {}, []
    for choice in CHOICES:
        value = value_of(choice.field)
        if value == choice.instead or value in choice.allowed:
            continue
        changes[choice.field] = choice.instead
        if (choice.field, value) not in _UNSET:
            flag = "--" + choice.field.replace("_", "-")
            asked = flag if value is True else f"{flag} {value}"
            warnings.append(f"{asked} needs a GPU: served by {choice.served_by} on this CPU")
    return changes, warnings
