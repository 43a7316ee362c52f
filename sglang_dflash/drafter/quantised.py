"""Quantised drafters: what their checkpoints store, and the plain weights that are served.

Every weight is dequantised when it is loaded, in float32 and by compressed-tensors, which knows its own formats and
reads AutoAWQ's; FP8 and GPTQ are put into its terms. Activations are never quantised. A layer is quantised if its
tensors say so, whatever the configuration's lists of exceptions hold; shapes are checked on headers, before any weight
is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

Shape = tuple[int, ...]
# FP8's two names of one factor. transformers calls it an inverse for a whole tensor too.
_ALIASES = {"weight_scale_inv": "weight_scale"}
_OF_ACTIVATIONS = {"input_scale", "activation_scale", "input_zero_point"}
_PARTS = {
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    *("qweight", "qzeros", "scales", "g_idx"),
}
_WORDS = {"weight_packed", "qweight", "qzeros"}
_QUANTISED_DTYPES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8}


@dataclass(frozen=True)
class Scheme:
    """How a linear layer's weight [O, I] is stored.

    Attributes:
        layout: ``naive`` (a tensor of small numbers), ``packed`` (compressed-tensors' words along I), ``awq`` or
            ``gptq``.
        args: bits, groups and zero points.
        raised: what is added to a stored zero point: 1 in GPTQ's first format.
    """

    layout: str
    args: QuantizationArgs
    raised: int = 0

    def shapes(self, rows: int, columns: int) -> dict[str, Shape]:
        """Shape of every stored tensor of a weight [rows, columns], by the end of its name.

        Raises:
            DFlashError: a row does not divide into groups.
        """
        args = self.args
        size = args.group_size or columns
        if columns % size:
            raise _broken(f"groups of {size} columns in a weight of {columns}", "a multiple of them")
        groups = columns // size
        if self.layout in ("awq", "gptq"):
            shapes: dict[str, Shape] = {"qzeros": (groups, self._words(rows)), "scales": (groups, rows)}
            if self.layout == "awq":
                return shapes | {"qweight": (columns, self._words(rows))}
            return shapes | {"qweight": (self._words(columns), rows), "g_idx": (columns,)}
        if args.strategy == "block":
            high, wide = args.block_structure
            scale: Shape = (ceil(rows / high), ceil(columns / wide))
        else:
            scale = (1,) if args.strategy == "tensor" else (rows, groups)
        if self.layout == "naive":
            shapes = {"weight": (rows, columns), "weight_scale": scale, "weight_zero_point": scale}
        else:
            shapes = {"weight_packed": (rows, self._words(columns)), "weight_shape": (2,), "weight_scale": scale}
            shapes["weight_zero_point"] = (self._words(rows), groups)
        if args.symmetric:
            del shapes["weight_zero_point"]
        return shapes | ({"weight_g_idx": (columns,)} if args.actorder == "group" else {})

    def dequantise(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        """The weight, float32 [rows, columns], from tensors of :meth:`shapes`.

        Raises:
            DFlashError: a column's group does not exist, or groups are of different sizes.
        """
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32 as unpack
        from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        args, bits = self.args, self.args.num_bits
        layout = self.layout
        if layout == "awq":
            converter = AutoAWQConverter(bits, args.group_size or columns)
            named = converter.process({f"layer.{part}": tensor for part, tensor in stored.items()})
            stored, layout = {name.removeprefix("layer."): tensor for name, tensor in named.items()}, "packed"
        scale = stored["scales"].T if layout == "gptq" else stored["weight_scale"]
        zero, order = stored.get("weight_zero_point"), stored.get("weight_g_idx", stored.get("g_idx"))
        if layout == "gptq":
            quantised = unpack(stored["qweight"], bits, torch.Size((columns, rows)), 0).T
            half = 1 << (bits - 1)  # unpacked numbers are signed
            zero = unpack(stored["qzeros"], bits, torch.Size((len(stored["scales"]), rows)), 1).T.int()
            zero = (zero + half + self.raised) % (1 << bits) - half
        elif layout == "packed":
            quantised = unpack(stored["weight_packed"], bits, torch.Size((rows, columns)), 1)
            if zero is not None:
                zero = unpack(zero, bits, torch.Size((rows, scale.shape[1])), 0)
        else:
            quantised = stored["weight"]
        if order is not None:
            # The library does not look: columns may be grouped in any order, but all groups have one size.
            size = columns // scale.shape[1]
            if not torch.equal(order.sort().values.long(), torch.arange(columns, device=order.device) // size):
                raise _broken(f"a g_idx whose groups are not of {size} columns each", "the group of every column")
        return dequantize(quantised, scale.float(), zero, args=args, g_idx=order)

    def _words(self, numbers: int) -> int:
        return ceil(numbers * self.args.num_bits / 32)


Groups = list[tuple[list[str], Scheme]]


@dataclass
class Quantised:
    """The quantisation of one checkpoint.

    Attributes:
        declared: as ``config.json`` says it.
        method: its name there.
        groups: layers and how they are stored; a layer's name goes before the class of all linear layers.
    """

    declared: Mapping[str, Any]
    method: str
    groups: Groups

    def plain(
        self, weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, Shape], problems: list[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Put the plain weight, float32, in the place of a layer's stored tensors; pass on what is none.

        Args:
            weights: names without ``model.``, and tensors; on the meta device shapes are checked and nothing computed.
            expected: shapes of the plain checkpoint.
            problems: takes a text for each tensor that does not fit.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            module, _, part = name.rpartition(".")
            part, shape = _ALIASES.get(part, part), expected.get(f"{module}.weight", ())
            if len(shape) == 2 and part in _OF_ACTIVATIONS:
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
                    if (tuple(each.shape) or (1,)) != shapes[part] or (part in _WORDS and each.dtype != torch.int32)
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


def _broken(found: str, expected: str) -> DFlashError:
    remedy = "use the drafter's plain weights, or quantise it again"
    return DFlashError(f"{found}, in the drafter's tensors", expected=expected, remedy=remedy)
