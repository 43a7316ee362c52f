"""The shipped drafters, quantised to the nearest number and stored as the tools of each format store them."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dflash_lab.pairs import drafter_path

Stored = dict[str, Tensor]
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight columns each four bits of a word hold
_TOKENS = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


@dataclass(frozen=True)
class Format:
    """A published layout.

    Attributes:
        declared: ``quantization_config`` as its tool writes it.
        weights: compressed-tensors' arguments of a weight.
        compressor: compressed-tensors' format, in which the numbers are made.
        rename: from there to the names and layout of the tool.
    """

    declared: dict[str, Any]
    weights: dict[str, Any]
    compressor: str = "float-quantized"
    rename: Callable[[Stored, tuple[int, int]], Stored] = lambda stored, shape: stored

    @property
    def scheme(self) -> QuantizationScheme:
        return QuantizationScheme(targets=["Linear"], weights=self.weights, format=self.compressor)

    def store(self, weight: Tensor) -> tuple[Stored, Tensor]:
        """Stored tensors of a weight, and the weight that they stand for, as the library reads its own form."""
        args, weight = self.scheme.weights, weight.float()
        rows, columns = weight.shape
        high, wide = args.block_structure or (rows, columns)
        if args.strategy == "channel":
            high = 1
        elif args.strategy == "group":
            high, wide = 1, args.group_size
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)
        scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), args)
        # Tools store factors in the dtype of the model, or in float16; compared is what they store.
        scale = scale.float() if self.compressor == "float-quantized" else scale.half().float()
        scale = scale.reshape(1) if args.strategy == "tensor" else scale
        zero = None if args.symmetric else zero.round().to(torch.int8)
        given = {"weight": weight, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
        stored = BaseCompressor.get_value_from_registry(self.compressor).compress(given, self.scheme)
        numbers = quantize(
            weight, scale, zero, args, dtype=args.pytorch_dtype() if args.type == "float" else torch.int8
        )
        plain = dequantize(numbers, scale, zero, args=args)
        stored["weight_scale"] = scale if self.compressor == "float-quantized" else scale.half()
        return {name: each.contiguous() for name, each in self.rename(stored, (rows, columns)).items()}, plain


def _block(stored: Stored, shape: tuple[int, int]) -> Stored:
    return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}


def _tensor(stored: Stored, shape: tuple[int, int]) -> Stored:
    scale = stored["weight_scale"].reshape(())
    return {"weight": stored["weight"], "weight_scale": scale, "input_scale": torch.tensor(0.5)}


def _numbers(stored: Stored, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [I, O], zero points [groups, O] and factors [groups, O], signed, of a packed form."""
    weight = unpack_from_int32(stored["weight_packed"], 4, torch.Size(shape))
    scale = stored["weight_scale"]
    zero = unpack_from_int32(stored["weight_zero_point"], 4, torch.Size((shape[0], scale.shape[1])), 0)
    return weight.T, zero.T, scale.T


def _gptq(stored: Stored, shape: tuple[int, int]) -> Stored:
    weight, zero, scale = _numbers(stored, shape)
    return {
        "qweight": pack_to_int32(weight, 4, 0),
        "qzeros": pack_to_int32(((zero.int() + 8 - 1) % 16 - 8).to(torch.int8), 4, 1),
        "scales": scale,
        "g_idx": (torch.arange(shape[1]) // (shape[1] // len(scale))).int(),
    }


def _awq(stored: Stored, shape: tuple[int, int]) -> Stored:
    weight, zero, scale = _numbers(stored, shape)
    weight, zero = (each.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1) for each in (weight, zero))
    return {"qweight": pack_to_int32(weight, 4), "qzeros": pack_to_int32(zero, 4), "scales": scale}


def _llm_compressor(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"format": form, "input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": {**group, "weights": {**weights, "dynamic": False, "observer": "minmax"}}},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.18.0",
    }


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_CHANNEL = {**_FP8, "strategy": "channel"}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
_INT4_ZERO = {**_INT4, "symmetric": False}
_PACKED = "pack-quantized"
FORMATS: dict[str, Format] = {
    "fp8, a factor a tensor": Format(
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        {**_FP8, "strategy": "tensor"},
        rename=_tensor,
    ),
    "fp8, a factor a block": Format(
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        {**_FP8, "strategy": "block", "block_structure": [128, 128]},
        rename=_block,
    ),
    "compressed-tensors fp8": Format(
        _llm_compressor("float-quantized", _CHANNEL, {**_TOKENS, "type": "float"}), _CHANNEL
    ),
    "compressed-tensors w8a8": Format(
        _llm_compressor("int-quantized", _INT8, {**_TOKENS, "type": "int"}), _INT8, "int-quantized"
    ),
    "compressed-tensors w4a16": Format(_llm_compressor(_PACKED, _INT4, None), _INT4, _PACKED),
    "compressed-tensors w4a16, zero points": Format(_llm_compressor(_PACKED, _INT4_ZERO, None), _INT4_ZERO, _PACKED),
    "awq": Format(
        {
            "bits": 4,
            "group_size": 64,
            "modules_to_not_convert": ["fc"],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        _INT4_ZERO,
        _PACKED,
        _awq,
    ),
    "gptq": Format(
        {
            "bits": 4,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "dynamic": {"-:fc": {}},
            "group_size": 64,
            "lm_head": False,
            "meta": {"quantizer": ["gptqmodel:7.7.0"]},
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": False,
        },
        _INT4_ZERO,
        _PACKED,
        _gptq,
    ),
}


def write(name: str, folder: Path, pair: str = "tiny-dense", drafter: str = "good") -> dict[str, Tensor]:
    """Quantise a shipped drafter to ``folder/quantised``, and the plain one that it stands for to ``folder/plain``.

    Returns:
        The plain tensors.
    """
    format_ = FORMATS[name]
    source = drafter_path(pair, drafter)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim != 2 or (key == "fc.weight" and name in ("awq", "gptq")):
            stored[key] = plain[key] = tensor
            continue
        parts, plain[key] = format_.store(tensor)
        stored |= {f"{key.removesuffix('weight')}{part}": each for part, each in parts.items()}
    config = json.loads((source / "config.json").read_text())
    for kind, tensors, extra in (
        ("quantised", stored, {"quantization_config": format_.declared}),
        ("plain", plain, {}),
    ):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "config.json").write_text(json.dumps({**config, **extra}))
        save_file(tensors, folder / kind / "model.safetensors")
    return plain


def main(pair: str = "tiny-dense") -> None:
    """Print accept lengths in each format, by the reference decoder: ``python -m tests.support.quantised``."""
    from sglang_dflash_lab.pairs import target_path
    from sglang_dflash_lab.train.reference_decoder import ReferenceDecoder
    from tests.support.prompts import corpus

    reference = ReferenceDecoder.load(target_path(pair), drafter_path(pair))
    for name in ("plain", *FORMATS):
        with TemporaryDirectory() as folder:
            if name != "plain":
                write(name, Path(folder), pair)
                reference = ReferenceDecoder.load(target_path(pair), Path(folder) / "plain")
        means = []
        for seed in range(3):
            steps = [reference.decode(prompt, 48, width=16).accept_lengths for prompt in corpus(pair, 4, seed)]
            means.append(sum(map(sum, steps)) / sum(map(len, steps)))
        print(f"| {name} | {sum(means) / 3:.2f} ({min(means):.2f} to {max(means):.2f}) |", flush=True)


if __name__ == "__main__":
    parser = ArgumentParser(description=main.__doc__)
    parser.add_argument("pair", nargs="?", default="tiny-dense")
    main(parser.parse_args().pair)
