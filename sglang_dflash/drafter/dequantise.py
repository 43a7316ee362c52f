"""Quantised drafters: the quantisations that a ``config.json`` declares, and their plain weights.

compressed-tensors dequantises to float32; FP8 and GPTQ are expressed in its terms. Lists of exceptions are not read: a
layer is quantised if its tensors are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.drafter.formats import text_config
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

Shape = tuple[int, ...]

STORED = "stored_quantization"  # SGLang does not read it
MODELOPT = "hf_quant_config.json"  # Model Optimizer's
_KEYS = ("quantization_config", "compression_config")
_NAIVE = ("int-quantized", "float-quantized", "naive-quantized")
_LAYOUTS = {"pack-quantized": "packed", **dict.fromkeys(_NAIVE, "naive")}
_DEFAULT_FORMATS = {"awq": "gemm", "gptq": "gptq"}
_STRATEGIES = ("tensor", "channel", "group", "block")
_SERVED = (
    "fp8 e4m3 with per-tensor or per-block scales, modelopt FP8, compressed-tensors (int-quantized, float-quantized, "
    "pack-quantized), awq (gemm), gptq (2, 3, 4 or 8 bits)"
)

# FP8 checkpoints use two names for the scale
_ALIASES = {"weight_scale_inv": "weight_scale"}
_ACTIVATION_SCALES = {"input_scale", "activation_scale", "input_zero_point"}
# transposed
_GPTQ = {"qweight": "weight_packed", "qzeros": "weight_zero_point", "scales": "weight_scale"}
_PARTS = {*_GPTQ, *_GPTQ.values(), "g_idx", "weight_g_idx", "weight_shape"}
_INT32 = {"weight_packed", "qweight", "qzeros"}
_QUANTISED_DTYPES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8}


@dataclass(frozen=True)
class Scheme:
    """How a linear layer's weight [O, I] is stored.

    Attributes:
        layout: ``naive`` (one value per weight), ``packed`` (compressed-tensors' words along I), ``awq`` or ``gptq``.
        zero_offset: added to stored zero points; 1 in GPTQ's first format.
    """

    layout: str
    args: QuantizationArgs
    zero_offset: int = 0

    def shapes(self, rows: int, columns: int) -> dict[str, Shape]:
        """Return the shapes of the stored tensors of a weight [rows, columns], by the last part of their names."""

        def words(numbers: int) -> int:
            return ceil(numbers * self.args.num_bits / 32)

        args = self.args
        size = columns if args.group_size in (None, -1) else args.group_size
        if columns % size:
            raise _misfit(f"groups of {size} columns do not divide a weight of {columns}")
        groups = columns // size
        if self.layout == "awq":
            return {"qweight": (columns, words(rows)), "qzeros": (groups, words(rows)), "scales": (groups, rows)}
        scale: Shape = (1,) if args.strategy == "tensor" else (rows, groups)
        if args.strategy == "block":
            high, wide = args.block_structure
            scale = ceil(rows / high), ceil(columns / wide)
        shapes: dict[str, Shape] = {"weight": (rows, columns), "weight_scale": scale, "weight_zero_point": scale}
        if self.layout != "naive":
            shapes = {"weight_packed": (rows, words(columns)), "weight_scale": scale, "weight_shape": (2,)}
            shapes["weight_zero_point"] = (words(rows), groups)
        if self.layout == "gptq":
            return {part: shapes[name][::-1] for part, name in _GPTQ.items()} | {"g_idx": (columns,)}
        if args.symmetric:
            del shapes["weight_zero_point"]
        return shapes | ({"weight_g_idx": (columns,)} if args.actorder == "group" else {})

    def dequantise(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        """Return the weight, float32 [rows, columns], from tensors of :meth:`shapes`."""
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
        from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        args, bits = self.args, self.args.num_bits
        if self.layout == "awq":
            named = AutoAWQConverter(bits).process({f"layer.{part}": tensor for part, tensor in stored.items()})
            stored = {name.removeprefix("layer."): tensor for name, tensor in named.items()}
        elif self.layout == "gptq":
            stored = {name: stored[part].T for part, name in _GPTQ.items()} | {"weight_g_idx": stored["g_idx"]}
        scale, zero, order = (stored.get(f"weight_{part}") for part in ("scale", "zero_point", "g_idx"))
        assert scale is not None, "the scale is part of every layout"
        quantised = stored.get("weight")
        if quantised is None:
            quantised = unpack_from_int32(stored["weight_packed"], bits, torch.Size((rows, columns)), 1)
            if zero is not None:
                zero = unpack_from_int32(zero, bits, torch.Size((rows, scale.shape[1])), 0)
        if zero is not None and self.zero_offset:
            half = 1 << (bits - 1)  # unpacked values are signed
            zero = (zero.int() + half + self.zero_offset) % (1 << bits) - half
        if order is not None:
            # the library does not check that all groups have one size
            size = columns // scale.shape[1]
            if not torch.equal(order.sort().values.long(), torch.arange(columns, device=order.device) // size):
                raise _misfit(f"a g_idx whose groups are not of {size} columns each")
        return dequantize(quantised, scale.float(), zero, args=args, g_idx=order)


Groups = list[tuple[list[str], Scheme]]


@dataclass
class Quantised:
    method: str
    groups: Groups

    def plain(
        self, weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, Shape], problems: list[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Replace the stored tensors of each layer with its plain float32 weight; yield other tensors unchanged.

        Args:
            weights: names without ``model.``, and tensors; only shapes are checked on the meta device.
            expected: shapes of the plain checkpoint.
            problems: receives a text for each tensor that does not fit.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            module, _, part = name.rpartition(".")
            part, shape = _ALIASES.get(part, part), expected.get(f"{module}.weight", ())
            if len(shape) == 2 and part in _ACTIVATION_SCALES:
                continue
            if len(shape) != 2 or not (part in _PARTS or (part == "weight" and tensor.dtype in _QUANTISED_DTYPES)):
                yield name, tensor
                continue
            stored = waiting.setdefault(module, {})
            stored[part] = tensor
            scheme = self._scheme(module)
            shapes = scheme.shapes(*shape)
            if stored.keys() == shapes.keys():
                wrong = [
                    f"{module}.{part} is {list(each.shape)} of {each.dtype}, not {list(shapes[part])}"
                    for part, each in waiting.pop(module).items()
                    if (tuple(each.shape) or (1,)) != shapes[part] or (part in _INT32 and each.dtype != torch.int32)
                ]
                problems += wrong
                if tensor.is_meta:
                    yield f"{module}.weight", torch.empty(shape, device="meta")
                elif not wrong:
                    yield f"{module}.weight", scheme.dequantise(stored, *shape)
        for module, stored in waiting.items():
            wanted = self._scheme(module).shapes(*expected[f"{module}.weight"])
            problems.append(f"{module} has {', '.join(sorted(stored))}, not {', '.join(sorted(wanted))}")

    def _scheme(self, module: str) -> Scheme:
        from compressed_tensors.utils.match import match_name

        for targets, scheme in self.groups:
            if any(match_name(name, target) for name in (module, f"model.{module}") for target in targets):
                return scheme
        return next((scheme for targets, scheme in self.groups if "Linear" in targets), self.groups[0][1])


def _misfit(found: str) -> DFlashError:
    remedy = "use the drafter's plain weights, or quantise it again"
    return DFlashError(f"{found}, in the drafter's tensors", remedy=remedy)


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


def set_aside(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> dict[str, Any]:
    """Move a drafter's quantisation to :data:`STORED` in ``dflash_config``, so that SGLang builds plain layers."""
    found = declared(config, modelopt)
    if found is None or is_set_aside(config):
        return dict(config)
    plain = {key: value for key, value in config.items() if key not in _KEYS}
    if isinstance(nested := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in nested.items() if key not in _KEYS}
    dflash = plain.get("dflash_config")
    return {**plain, "dflash_config": {**(dflash if isinstance(dflash, Mapping) else {}), STORED: found}}


def is_set_aside(config: Mapping[str, Any]) -> bool:
    dflash = config.get("dflash_config")
    return isinstance(dflash, Mapping) and STORED in dflash


def parse(config: Mapping[str, Any]) -> Quantised:
    """Parse a declared quantisation; an unsupported one is a DFlashError."""
    method = method_of(config)
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if config.get(key):
            raise _unserved(f"{method} with scales for the K/V cache ({key})")
    read = {"fp8": _fp8, "modelopt": _fp8, "compressed-tensors": _compressed, "awq": _packed, "gptq": _packed}
    if method not in read:
        raise _unserved(method)
    try:
        return Quantised(method, read[method](config))
    except DFlashError:
        raise
    except (ValueError, TypeError, AttributeError, NotImplementedError, re.error) as error:  # raised by the library
        raise _unserved(f"{method} ({' '.join(str(error).split())})") from None


def method_of(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method") or config.get("quant_algo") or "unnamed")
    return "compressed-tensors" if method == "compressed_tensors" else method


def _fp8(config: Mapping[str, Any]) -> Groups:
    from compressed_tensors.quantization import QuantizationArgs

    kind, block = config.get("quant_algo") or config.get("fmt") or "e4m3", config.get("weight_block_size")
    if kind not in ("e4m3", "FP8"):
        raise _unserved(f"{method_of(config)} in the format {kind}")
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

    method, bits = method_of(config), config.get("bits")
    stored_as = config.get("version") or config.get("checkpoint_format") or config.get("format")
    stored_as = "marlin" if config.get("is_marlin_format") else str(stored_as or _DEFAULT_FORMATS[method]).lower()
    served = {"gemm": (4,)} if method == "awq" else dict.fromkeys(("gptq", "gptq_v2"), (2, 3, 4, 8))
    if bits not in served.get(stored_as, ()) or (method == "awq" and not config.get("zero_point", True)):
        raise _unserved(f"{method} of {bits} bits in the format {stored_as}, zero_point {config.get('zero_point')}")
    args = QuantizationArgs(num_bits=bits, symmetric=False, group_size=config.get("group_size", 128))
    return [(["Linear"], Scheme(method, args, zero_offset=int(stored_as == "gptq")))]


def _unserved(found: str) -> DFlashError:
    return DFlashError(
        f"the drafter is quantised by {found}; the worker reads {_SERVED}",
        remedy="use the drafter's plain weights: it is small compared with its target",
    )
