"""What a ``config.json`` says of quantisation, in the words of the tools that write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.keys import text_config
from sglang_dflash.drafter.quantised import Quantised, Scheme
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

STORED = "stored_quantization"  # in dflash_config: where SGLang, which would build quantised layers, does not look
MODELOPT = "hf_quant_config.json"  # Model Optimizer's file beside config.json
_PLACES = ("quantization_config", "compression_config")
_LAYOUTS = {"pack-quantized": "packed"} | dict.fromkeys(
    ("int-quantized", "float-quantized", "naive-quantized"), "naive"
)
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
    found = declared(config) or beside
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
    if nested := config.get("quantization"):  # hf_quant_config.json
        config = nested
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if config.get(key):
            raise _unserved(f"{method} with factors for the K/V cache ({key})")
    read = {"fp8": _fp8, "modelopt": _modelopt, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq}
    if method not in read:
        raise _unserved(method)
    try:
        groups = read[method](config)
    except (ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, DFlashError):
            raise
        raise _unserved(f"{method} ({' '.join(str(error).split())})") from None
    return Quantised(config, method, groups)


def _method(config: Mapping[str, Any]) -> str:
    method = config.get("quant_method") or config.get("quant_algo")
    if method is None and "producer" in config:
        method = "modelopt"
    return str(method or "unnamed").replace("_", "-")


def _fp8(config: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    from compressed_tensors.quantization import QuantizationArgs

    if config.get("fmt") not in (None, "e4m3"):
        raise _unserved(f"fp8 in the format {config['fmt']}")
    block = config.get("weight_block_size")
    strategy = "tensor" if block is None else "block"
    return _one("naive", QuantizationArgs(type="float", strategy=strategy, block_structure=block))


def _modelopt(config: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    if config.get("quant_algo") != "FP8":
        raise _unserved(f"modelopt {config.get('quant_algo')}")
    return _fp8({})


def _compressed(config: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(config)
    if config.get("quantization_status", "compressed") != "compressed":
        raise _unserved(f"compressed-tensors with the status {config['quantization_status']}")
    for key in ("transform_config", "sparsity_config"):
        if (config.get(key) or {}).get("format", config.get(key)) not in (None, {}, "dense"):
            raise _unserved(f"compressed-tensors with a {key}")
    schemes = [scheme for scheme in read.config_groups.values() if not isinstance(scheme, list)]
    return [(scheme.targets, _scheme(scheme, read.format)) for scheme in schemes]


def _scheme(scheme: QuantizationScheme, common: str) -> Scheme:
    stored_as, args = str(scheme.format or common), scheme.weights
    if args is None or stored_as not in _LAYOUTS or args.strategy not in ("tensor", "channel", "group", "block"):
        raise _unserved(f"compressed-tensors in the format {stored_as}")
    return Scheme(_LAYOUTS[stored_as], args)


def _awq(config: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    bits, zero_point = config.get("bits"), config.get("zero_point", True)
    version = config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm"
    if str(version).lower() != "gemm" or bits != 4 or not zero_point:
        raise _unserved(f"awq of {bits} bits in the version {version}, zero_point {zero_point}")
    return _one("awq", _grouped(config))


def _gptq(config: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    stored_as = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format"):
        stored_as = "marlin"
    if stored_as not in ("gptq", "gptq_v2") or config.get("bits") not in (2, 3, 4, 8):
        raise _unserved(f"gptq of {config.get('bits')} bits in the format {stored_as}")
    return _one("gptq", _grouped(config), raised=int(stored_as == "gptq"))


def _grouped(config: Mapping[str, Any]) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(num_bits=config["bits"], symmetric=False, group_size=config.get("group_size", 128))


def _one(layout: str, args: Any, raised: int = 0) -> list[tuple[list[str], Scheme]]:
    return [(["Linear"], Scheme(layout, args, raised))]


def _unserved(found: str) -> DFlashError:
    return DFlashError(
        f"the drafter is quantised by {found}",
        expected=f"plain weights, or {_SERVED}",
        remedy="use the drafter's plain weights: it is small beside its target",
    )
