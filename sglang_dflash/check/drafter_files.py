"""The drafter's files: its code, its tensors by their headers, dtype and quantisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_dflash.check.findings import Finding, judge
from sglang_dflash.drafter.config import DrafterConfig, quantization
from sglang_dflash.drafter.files import TensorHeader
from sglang_dflash.drafter.tensors import LoadReport
from sglang_dflash.errors import DFlashError, Doubt
from sglang_dflash.plan.pair import served_dtype

_KEY = "AutoConfig"  # the only entry of auto_map that SGLang asks transformers for; weights load into our own classes


def check_code(config: Mapping[str, Any], trusted: bool) -> str:
    """Describe the code that a drafter brings.

    Args:
        config: its ``config.json``.
        trusted: ``--trust-remote-code``.

    Raises:
        DFlashError: some would run.
    """
    named = config.get("auto_map")
    if not trusted or not isinstance(named, Mapping) or _KEY not in named:
        return "none of its own runs"
    raise DFlashError(
        f"--trust-remote-code would run the drafter's own code ({_KEY} {named[_KEY]!r} in its config.json)",
        expected="a drafter without code: sglang-dflash has its model, and nothing of the drafter needs to run",
        remedy=f"take {_KEY} out of auto_map in the drafter's config.json, or leave --trust-remote-code out",
    )


def check_weights(
    drafter: DrafterConfig, tensors: Mapping[str, TensorHeader] | None, target: Mapping[str, Any], dtype: str
) -> Iterator[Finding]:
    """Findings on the drafter's tensors, dtype and quantisation.

    Args:
        drafter: the parsed configuration.
        tensors: the drafter's headers, None if none could be read.
        target: the target's ``config.json``.
        dtype: ``--dtype``.
    """
    yield judge("drafter's tensors", _tensors, drafter, tensors)
    yield judge("dtype", _dtype, drafter, served_dtype(target, dtype))
    yield judge("quantisation", _quantization, drafter, target)


def _tensors(drafter: DrafterConfig, tensors: Mapping[str, TensorHeader] | None) -> str:
    """Compare names and shapes with the configuration, by the loader's own rules."""
    if tensors is None:
        raise Doubt(
            "no safetensors header can be read",
            expected="a safetensors checkpoint",
            remedy="none needed: the loader checks names and shapes again",
        )
    report = LoadReport.of(drafter)
    for name, header in tensors.items():
        report.accepts(name.removeprefix("model."), header.shape)
    report.check(complete=True)
    return f"{len(tensors)}, as config.json describes them"


def _dtype(drafter: DrafterConfig, served: str) -> str:
    if served != "float16":
        return f"{served}, drafter stored in {drafter.dtype or 'an unstated dtype'}"
    raise Doubt(
        "the pair is served in float16",
        expected="bfloat16 or float32: hidden states of Qwen3 targets overflow float16 and acceptance collapses",
        remedy="set --dtype bfloat16 (or float32: SGLang's auto serves float32 checkpoints in float16)",
    )


def _quantization(drafter: DrafterConfig, target: Mapping[str, Any]) -> str:
    if drafter.quantization is None:
        return f"target {quantization(target) or 'none'}, drafter none"
    raise Doubt(
        f"the drafter is quantised ({drafter.quantization})",
        expected="plain weights, or a method that SGLang's linear layers load",
        remedy="compare its accept length with the plain drafter's",
    )
