"""What a ``config.json`` says of quantisation, in the words of the tools that write it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.keys import text_config
from sglang_dflash.drafter.quantised import Groups, Quantised, Scheme
from sglang_dflash.errors import DFlashError

STORED = "stored_quantization"  # in dflash_config: where SGLang, which would build quantised layers, does not look
MODELOPT = "hf_quant_config.json"  # Model Optimizer's file beside config.json
_PLACES = ("quantization_config", "compression_config")
_NAIVE = ("int-quantized", "float-quantized", "naive-quantized")
_LAYOUTS = {"pack-quantized": "packed", **dict.fromkeys(_NAIVE, "naive")}
_USUAL = {"awq": "gemm", "gptq": "gptq"}
_STRATEGIES = ("tensor", "channel", "group", "block")
_SERVED = (
    "fp8 (e4m3, a factor a tensor or a block), modelopt FP8, compressed-tensors (int-quantized, float-quantized, "
    "pack-quantized), awq (gemm), gptq (2, 3, 4 or 8 bits)"
)


def declared(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation that a configuration declares."""
    for place in (config, text_config(config)):
        for key in _PLACES:
            if isinstance(found := place.get(key), Mapping) and found:
                return found
    return None


def quantization(config: Mapping[str, Any]) -> str | None:
    """Quantisation method that a checkpoint declares (``"fp8"``, ``"modelopt"``), None for plain weights."""
    found = declared(config)
    return None if found is None else _method(found)


def set_aside(config: Mapping[str, Any], beside: Mapping[str, Any] | None) -> dict[str, Any]:
    """A drafter's configuration of which SGLang builds plain layers; ours reads :data:`STORED` in ``dflash_config``.

    Args:
        beside: Model Optimizer's ``hf_quant_config.json``, if there is one.
    """
    found = declared(config)
    if (
        found is None
        and beside
        and isinstance(inner := beside.get("quantization"), Mapping)
        and inner.get("quant_algo")
    ):
        found = {"quant_method": "modelopt", **inner}
    if found is None or is_set_aside(config):
        return dict(config)
    plain = {key: value for key, value in config.items() if key not in _PLACES}
    if isinstance(nested := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in nested.items() if key not in _PLACES}
    dflash = plain.get("dflash_config")
    return {**plain, "dflash_config": {**(dflash if isinstance(dflash, Mapping) else {}), STORED: found}}


def is_set_aside(config: Mapping[str, Any]) -> bool:
    """Whether :func:`set_aside` has moved the quantisation of ``config``."""
    dflash = config.get("dflash_config")
    return isinstance(dflash, Mapping) and STORED in dflash


def parse(config: Mapping[str, Any]) -> Quantised:
    """Read a declared quantisation.

    Raises:
        DFlashError: its weights are not dequantised here.
    """
    method = _method(config)
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if config.get(key):
            raise _unserved(f"{method} with factors for the K/V cache ({key})")
    read = {"fp8": _fp8, "modelopt": _fp8, "compressed-tensors": _compressed, "awq": _packed, "gptq": _packed}
    if method not in read:
        raise _unserved(method)
    try:
        return Quantised(config, method, read[method](config))
    except DFlashError:
        raise
    except (ValueError, TypeError, AttributeError, NotImplementedError, re.error) as error:  # what the library refuses
        raise _unserved(f"{method} ({' '.join(str(error).split())})") from None


def _method(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method") or config.get("quant_algo") or "unnamed")
    return "compressed-tensors" if method == "compressed_tensors" else method


def _fp8(config: Mapping[str, Any]) -> Groups:
    from compressed_tensors.quantization import QuantizationArgs

    kind, block = config.get("quant_algo") or config.get("fmt") or "e4m3", config.get("weight_block_size")
    if kind not in ("e4m3", "FP8"):
        raise _unserved(f"{_method(config)} in the format {kind}")
    args = QuantizationArgs(type="float", strategy="block" if block else "tensor", block_structure=block or None)
    return [(["Linear"], Scheme("naive", args))]


def _compressed(config: Mapping[str, Any]) -> Groups:
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(config)
    if config.get("quantization_status", "compressed") != "compressed":
        raise _unserved(f"compressed-tensors with the status {config['quantization_status']}")
    for key in ("transform_config", "sparsity_config"):
        if (config.get(key) or {}).get("format", config.get(key)) not in (None, {}, "dense"):
            raise _unserved(f"compressed-tensors with a {key}")
    groups = []
    for scheme in read.config_groups.values():
        stored_as, args = str(scheme.format or read.format), scheme.weights
        if args is None or stored_as not in _LAYOUTS or args.num_bits > 8 or args.strategy not in _STRATEGIES:
            raise _unserved(f"compressed-tensors in the format {stored_as}")
        for target in scheme.targets:
            re.compile(target.removeprefix("re:"))
        groups.append((scheme.targets, Scheme(_LAYOUTS[stored_as], args)))
    return groups


def _packed(config: Mapping[str, Any]) -> Groups:
    from compressed_tensors.quantization import QuantizationArgs

    method, bits = _method(config), config.get("bits")
    stored_as = config.get("version") or config.get("checkpoint_format") or config.get("format")
    stored_as = "marlin" if config.get("is_marlin_format") else str(stored_as or _USUAL[method]).lower()
    served = {"gemm": (4,)} if method == "awq" else dict.fromkeys(("gptq", "gptq_v2"), (2, 3, 4, 8))
    if bits not in served.get(stored_as, ()) or (method == "awq" and not config.get("zero_point", True)):
        raise _unserved(f"{method} of {bits} bits in the format {stored_as}, zero_point {config.get('zero_point')}")
    args = QuantizationArgs(num_bits=bits, symmetric=False, group_size=config.get("group_size", 128))
    return [(["Linear"], Scheme(method, args, raised=int(stored_as == "gptq")))]


def _unserved(found: str) -> DFlashError:
    return DFlashError(
        f"the drafter is quantised by {found}",
        expected=f"plain weights, or {_SERVED}",
        remedy="use the drafter's plain weights: it is small beside its target",
    )
