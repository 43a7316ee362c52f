"""The drafter's files: its code, its tensors by their headers, dtype and quantisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_dflash.check.findings import Finding, judge
from sglang_dflash.drafter.checkpoint import TensorHeader
from sglang_dflash.drafter.config import DrafterConfig, quantization
from sglang_dflash.drafter.tensors import LoadReport
from sglang_dflash.errors import DFlashError, Doubt
from sglang_dflash.plan.pair import PLAIN_LAYERS, served_dtype

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
    drafter: DrafterConfig,
    tensors: Mapping[str, TensorHeader] | None,
    target: Mapping[str, Any],
    dtype: str,
    layers: str | None = None,
) -> Iterator[Finding]:
    """Findings on the drafter's tensors, dtype and quantisation.

    Args:
        drafter: the parsed configuration.
        tensors: the drafter's headers, None if none could be read.
        target: the target's ``config.json``.
        dtype: ``--dtype``.
        layers: ``--speculative-draft-model-quantization``.
    """
    yield judge("drafter's tensors", _tensors, drafter, tensors)
    served = served_dtype(target, dtype)
    yield judge("dtype", _dtype, drafter, served)
    yield judge("quantisation", _quantization, drafter, target, served, layers)


def _tensors(drafter: DrafterConfig, tensors: Mapping[str, TensorHeader] | None) -> str:
    """Compare names and shapes with the configuration, by the loader's own rules."""
    if tensors is None:
        raise Doubt(
            "no safetensors header can be read",
            expected="a safetensors checkpoint",
            remedy="none needed: the loader checks names and shapes again",
        )
    report = LoadReport.of(drafter)
    for _ in report.place((name, header.empty()) for name, header in tensors.items()):
        pass
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


def _quantization(drafter: DrafterConfig, target: Mapping[str, Any], served: str, layers: str | None) -> str:
    if layers not in (None, PLAIN_LAYERS):
        raise Doubt(
            f"--speculative-draft-model-quantization {layers}: SGLang's quantised layers, which have not run here",
            expected="plain layers, into which a quantised drafter is dequantised",
            remedy="leave the flag out, or compare the accept length with and without it",
        )
    drafters = f"{drafter.stored.method}, dequantised to {served} when loaded" if drafter.stored else "none"
    return f"target {quantization(target) or 'none'}, drafter {drafters}"
