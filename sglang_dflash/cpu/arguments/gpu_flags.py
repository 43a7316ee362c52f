"""GPU-only choices of a command line, mapped to what serves them on a CPU, so that a command written for a GPU starts.

The mapping is data: one :class:`Choice` a server argument. Values that a CPU can serve pass through untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash.cpu.layers.attention import NAME as ATTENTION


@dataclass(frozen=True)
class Choice:
    """One server argument: the values a CPU can serve, and the value taken instead of any other."""

    field: str
    allowed: frozenset[Any]
    instead: Any
    served_by: str


def _choice(field: str, *allowed: Any, instead: Any, served_by: str) -> Choice:
    return Choice(field, frozenset({*allowed, instead}), instead, served_by)


_TORCH_GDN = "the CPU platform's torch kernels"
_GLOO = "gloo"

CHOICES: tuple[Choice, ...] = (
    _choice("attention_backend", instead=ATTENTION, served_by="torch attention"),
    _choice("prefill_attention_backend", instead=None, served_by="torch attention"),
    _choice("decode_attention_backend", instead=None, served_by="torch attention"),
    _choice("speculative_draft_attention_backend", None, instead=ATTENTION, served_by="torch attention"),
    # "triton" is upstream's name for the functions that our table replaces.
    _choice("linear_attn_backend", instead="triton", served_by=_TORCH_GDN),
    _choice("linear_attn_prefill_backend", None, instead="triton", served_by=_TORCH_GDN),
    _choice("linear_attn_decode_backend", None, instead="triton", served_by=_TORCH_GDN),
    _choice("linear_attn_verify_backend", None, instead="triton", served_by=_TORCH_GDN),
    _choice("mamba_backend", None, instead="triton", served_by=_TORCH_GDN),
    _choice("enable_linear_replayssm", instead=False, served_by=_TORCH_GDN),
    _choice("enable_linear_replayssm_spec", instead=False, served_by=_TORCH_GDN),
    _choice("sampling_backend", instead="pytorch", served_by="torch"),
    _choice("moe_runner_backend", "auto", "triton", instead="auto", served_by="torch experts"),
    _choice("moe_a2a_backend", None, instead="none", served_by=_GLOO),
    _choice("bf16_gemm_backend", "auto", instead="torch", served_by="torch"),
    _choice("flashinfer_allreduce_fusion_backend", instead=None, served_by=_GLOO),
    _choice("enable_flashinfer_allreduce_fusion", instead=False, served_by=_GLOO),
    _choice("enable_aiter_allreduce_fusion", instead=False, served_by=_GLOO),
    _choice("enable_mscclpp", instead=False, served_by=_GLOO),
    _choice("enable_nccl_nvls", instead=False, served_by=_GLOO),
    _choice("enable_symm_mem", instead=False, served_by=_GLOO),
    _choice("enable_torch_symm_mem", instead=False, served_by=_GLOO),
    _choice("enable_torch_compile", instead=False, served_by="eager torch"),
)

# Not worth a line in the log: nobody asks for these, they are what an argument left alone holds.
_SILENT = {("attention_backend", None), ("sampling_backend", None)}


def cpu_values(value_of: Callable[[str], Any]) -> tuple[dict[str, Any], list[str]]:
    """Server arguments to change, and a warning line for each choice that was somebody's.

    Args:
        value_of: reads a server argument by name.
    """
    changes, warnings = {}, []
    for choice in CHOICES:
        value = value_of(choice.field)
        if value in choice.allowed:
            continue
        changes[choice.field] = choice.instead
        if (choice.field, value) not in _SILENT:
            flag = "--" + choice.field.replace("_", "-")
            asked = flag if value is True else f"{flag} {value}"
            warnings.append(f"{asked} needs a GPU: served by {choice.served_by} on this CPU")
    return changes, warnings
