"""How a checkpoint's files declare its quantisation. SGLang's quantised layers load the weights."""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.formats import text_config

MODELOPT = "hf_quant_config.json"  # Model Optimizer's
_KEYS = ("quantization_config", "compression_config")
# method -> forms that a test loads into SGLang's layers
_TESTED = {
    "fp8": {"e4m3"},
    "modelopt": {"FP8", "NVFP4"},
    "compressed-tensors": {"float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized"},
    "awq": {"4 bits, gemm"},
    "gptq": {f"{bits} bits, {kind}, symmetric" for bits in (4, 8) for kind in ("gptq", "gptq_v2")},
}


def declared(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    for place in (config, text_config(config)):
        for key in _KEYS:
            if isinstance(found := place.get(key), Mapping) and found:
                return found
    inner = (modelopt or {}).get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, Mapping) and inner.get("quant_algo") else None


def quantization(config: Mapping[str, Any]) -> str | None:
    found = declared(config)
    return None if found is None else method_of(found)


def method_of(stored: Mapping[str, Any]) -> str:
    method = str(stored.get("quant_method") or stored.get("quant_algo") or "unnamed")
    return "compressed-tensors" if method == "compressed_tensors" else method


def untested_form(stored: Mapping[str, Any]) -> str | None:
    """Return the form of a declared quantisation if no test here loads it, otherwise None."""
    method = method_of(stored)
    untested = sorted(_forms(stored, method) - _TESTED.get(method, set()))
    return f"{method} ({'; '.join(untested)})" if untested else None


def is_read(stored: Mapping[str, Any]) -> bool:
    """Return whether SGLang may have layers for an untested form."""
    sparsity = stored.get("sparsity_config")
    changed = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"
    return not (method_of(stored) in ("awq", "gptq") or stored.get("transform_config") or changed)


def _forms(stored: Mapping[str, Any], method: str) -> set[str]:
    found, stated = stored.get("quant_algo") or stored.get("fmt"), stored.get("format")
    forms = {str(found or ("e4m3" if method == "fp8" else "unknown"))}
    if method == "compressed-tensors":
        groups = stored.get("config_groups")
        groups = groups.values() if isinstance(groups, Mapping) else ()
        forms = {str((isinstance(group, Mapping) and group.get("format")) or stated) for group in groups} or forms
    elif method == "awq":
        forms = {f"{stored.get('bits')} bits, {str(stored.get('version') or 'gemm').lower()}"}
    elif method == "gptq":
        kind = stored.get("checkpoint_format") or stated or "gptq"
        forms = {f"{stored.get('bits')} bits, {kind}, {'symmetric' if stored.get('sym') is True else 'asymmetric'}"}
    scaled = stored.get("kv_cache_scheme") or stored.get("kv_cache_quant_algo")
    forms |= {"scales of the K/V cache"} if scaled else set()
    return forms if is_read(stored) or method != "compressed-tensors" else forms | {"rotated or sparse weights"}
