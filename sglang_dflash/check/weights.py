"""The drafter's tensors, by their headers, and the dtype that the pair is served in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_dflash.check.findings import Finding, of_error, ok, warn
from sglang_dflash.drafter.config import DrafterConfig, quantization, text_config
from sglang_dflash.drafter.files import TensorHeader
from sglang_dflash.drafter.tensors import LoadReport, expected_shapes
from sglang_dflash.errors import DFlashError


def check_weights(drafter: DrafterConfig, tensors: Mapping[str, TensorHeader] | None) -> Finding:
    """Compare names and shapes with the configuration, by the loader's own rules.

    Args:
        drafter: the parsed configuration.
        tensors: the checkpoint's headers, None if none could be read.
    """
    about = "drafter's tensors"
    if tensors is None:
        return warn(
            about,
            "no safetensors header can be read",
            expected="a safetensors checkpoint",
            remedy="none needed: the loader checks names and shapes again",
        )
    report = LoadReport(expected_shapes(drafter), quantized=drafter.quantization is not None)
    for name, header in tensors.items():
        report.accepts(name.removeprefix("model."), header.shape)
    try:
        report.check(complete=True)
    except DFlashError as raised:
        return of_error(about, raised)
    return ok(about, f"{len(tensors)}, as config.json describes them")


def check_dtypes(drafter: DrafterConfig, target: Mapping[str, Any], dtype: str) -> Iterator[Finding]:
    """Findings on dtype and quantisation.

    Args:
        target: the target's ``config.json``.
        dtype: ``--dtype``.
    """
    served = served_dtype(target, dtype)
    if served == "float16":
        yield warn(
            "dtype",
            "the pair is served in float16",
            expected="bfloat16 or float32: hidden states of Qwen3 targets overflow float16 and acceptance collapses",
            remedy="set --dtype bfloat16 (or float32: SGLang's auto serves float32 checkpoints in float16)",
        )
    else:
        yield ok("dtype", f"{served}, drafter stored in {drafter.dtype or 'an unstated dtype'}")
    if drafter.quantization is None:
        yield ok("quantisation", f"target {quantization(target) or 'none'}, drafter none")
    else:
        yield warn(
            "quantisation",
            f"the drafter is quantised ({drafter.quantization})",
            expected="plain weights, or a method that SGLang's linear layers load",
            remedy="compare its accept length with the plain drafter's",
        )


def served_dtype(target: Mapping[str, Any], dtype: str) -> str:
    """The dtype SGLang computes in: its ``auto`` serves float32 checkpoints in float16."""
    if dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(dtype, dtype)
    text = text_config(target)
    stated = text.get("dtype") or text.get("torch_dtype") or target.get("dtype")
    return "float16" if stated in (None, "float32") else str(stated)
