"""A shipped drafter in every quantised form, and what its stored tensors mean, in torch.

tests/drafter/test_quantised.py compares :func:`weight_of` with the tools that wrote tests/fixtures/quantised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from sglang_dflash_lab.pairs import drafter_path
from tests.support.configs import write_model

Parts = dict[str, Tensor]

BLOCK, GROUP = 128, 32
E4M3, LARGEST = torch.float8_e4m3fn, 448
# NVFP4's numbers by their four bits
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of a word's nibbles
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Numbers of int32 words along ``dim``, the lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    words = words.movedim(dim, -1)[..., None]
    return ((words >> shifts) & ((1 << bits) - 1)).flatten(-2).movedim(-1, dim)


def pack(numbers: Tensor, bits: int, dim: int) -> Tensor:
    numbers = numbers.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    words = (numbers << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().movedim(-1, dim).contiguous()


def weight_of(parts: Mapping[str, Tensor], config: Mapping[str, Any], widths: Sequence[int] = ()) -> Tensor:
    """The weight [O, I], float32, that stored tensors mean.

    Args:
        parts: by the last part of their names, of one layer or of a fused one.
        config: the declared quantisation.
        widths: rows of each part of a fused layer, for numbers that are stored once per part.
    """
    method = config["quant_method"]
    if method == "awq":
        return _awq(parts)
    if method == "gptq":
        return _gptq(parts, config)

    def rows(scale: Tensor) -> Tensor:
        scale = scale.float().reshape(-1)
        each = torch.tensor([*widths] or [1])
        return (scale if len(scale) == 1 else scale.repeat_interleave(each))[:, None]

    if "weight_global_scale" in parts:  # compressed-tensors' NVFP4 divides by it
        return _nvfp4(parts["weight_packed"], parts["weight_scale"], rows(1 / parts["weight_global_scale"].float()))
    if "weight_scale_2" in parts:
        return _nvfp4(parts["weight"], parts["weight_scale"], rows(parts["weight_scale_2"]))
    if "weight_packed" in parts:
        return _words(parts, config)
    weight = parts["weight"].float()
    if (scale := parts.get("weight_scale_inv")) is not None:
        high, wide = config["weight_block_size"]
        factors = scale.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)
        return weight * factors[: weight.shape[0], : weight.shape[1]]
    scale = parts["weight_scale"]
    return weight * (scale.float() if scale.dim() == 2 else rows(scale))


def _awq(parts: Mapping[str, Tensor]) -> Tensor:
    order = torch.tensor(_AWQ_ORDER)

    def read(words: Tensor) -> Tensor:
        return unpack(words, 4, 1).unflatten(1, (-1, 8))[..., order].flatten(1)

    size = parts["qweight"].shape[0] // parts["scales"].shape[0]
    zeros, scales = (each.repeat_interleave(size, 0) for each in (read(parts["qzeros"]), parts["scales"].float()))
    return ((read(parts["qweight"]) - zeros) * scales).T


def _gptq(parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    bits, group = config["bits"], parts["g_idx"].long()
    zeros = unpack(parts["qzeros"], bits, 1) + (config.get("checkpoint_format", "gptq") == "gptq")
    if config.get("sym"):
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    return ((unpack(parts["qweight"], bits, 0) - zeros[group]) * parts["scales"].float()[group]).T


def _words(parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    numbers, scale = unpack(parts["weight_packed"], bits, 1), parts["weight_scale"].float()
    zeros = torch.full(scale.shape, 1 << (bits - 1))
    if (packed := parts.get("weight_zero_point")) is not None:
        zeros = unpack(packed, bits, 0)
    size = numbers.shape[1] // scale.shape[1]
    return (numbers - zeros.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)


def _nvfp4(packed: Tensor, scale: Tensor, second: Tensor) -> Tensor:
    numbers = E2M1[torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()]
    return numbers * scale.float().repeat_interleave(16, 1) * second


def _blocks(weight: Tensor, high: int = BLOCK, wide: int = BLOCK) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % wide, 0, -rows % high))
    scale = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).abs().amax((1, 3)) / LARGEST
    factors = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    return (weight / factors).to(E4M3), scale


def _fp8_blocks(weight: Tensor) -> Parts:
    stored, scale = _blocks(weight)
    return {"weight": stored, "weight_scale_inv": scale}


def _fp8_rows(weight: Tensor) -> Parts:
    stored, scale = _blocks(weight, 1, weight.shape[1])
    return {"weight": stored, "weight_scale": scale}


def _fp8_whole(weight: Tensor) -> Parts:
    stored, scale = _blocks(weight, *weight.shape)
    return {"weight": stored, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.5)}


def _int8(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _integers(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers [O, I] from 0, and the scales [O, groups] of their distance to the middle."""
    middle, groups = 1 << (bits - 1), weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / (middle - 1)
    numbers = (groups / scale[..., None]).round().clamp(-middle, middle - 1) + middle
    return numbers.flatten(1).int(), scale


def _packed(weight: Tensor, *, zero: bool = False) -> Parts:
    numbers, scale = _integers(weight, 4)
    parts = {"weight_packed": pack(numbers, 4, 1), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return parts | ({"weight_zero_point": pack(torch.full(scale.shape, 7), 4, 0)} if zero else {})


def _as_awq(weight: Tensor) -> Parts:
    numbers, scale = _integers(weight, 4)
    inverse = torch.tensor(_AWQ_ORDER).argsort()

    def words(found: Tensor) -> Tensor:
        return pack(found.unflatten(1, (-1, 8))[..., inverse].flatten(1), 4, 1)

    return {"qweight": words(numbers.T), "qzeros": words(torch.full(scale.T.shape, 8)), "scales": scale.T.contiguous()}


def _as_gptq(bits: int) -> Callable[[Tensor], Parts]:
    def stored(weight: Tensor) -> Parts:
        numbers, scale = _integers(weight, bits)
        zeros = torch.full(scale.T.shape, (1 << (bits - 1)) - 1)  # the first format subtracts one
        parts = {"qweight": pack(numbers.T, bits, 0), "qzeros": pack(zeros, bits, 1), "scales": scale.T.contiguous()}
        return parts | {"g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP}

    return stored


def _fp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    second = weight.abs().max() / (6 * LARGEST)
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(2) / (6 * second)).to(E4M3)
    numbers = groups / (scale.float() * second)[..., None]
    codes = (numbers[..., None] - E2M1).abs().argmin(-1).flatten(1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, second


def _modelopt_fp4(weight: Tensor) -> Parts:
    packed, scale, second = _fp4(weight)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.tensor(0.01)}


def _compressed_fp4(weight: Tensor) -> Parts:
    packed, scale, second = _fp4(weight)
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": 1 / second.reshape(1)}
    return parts | {"input_global_scale": torch.tensor([100.0])}


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "dynamic": False}
_ROWS = {"num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


@dataclass(frozen=True)
class Form:
    """A quantised form.

    Attributes:
        config: ``quantization_config`` without its list of ignored layers.
        stored: the parts of a weight.
        ignored: the key of that list, or None: the tool declares none.
        only_layers: whether the tool quantises the transformer's layers alone.
        method: SGLang's name of its layers on an H100.
        linear: the class of SGLang's that holds the weights.
    """

    config: dict[str, Any]
    stored: Callable[[Tensor], Parts]
    ignored: str | None
    method: str
    linear: str
    only_layers: bool = False


_COMPRESSED = {"ignored": "ignore", "method": "compressed-tensors", "linear": "CompressedTensorsLinearMethod"}
FORMS = {
    "fp8, blocks": Form(FP8_BLOCKS, _fp8_blocks, "modules_to_not_convert", "fp8", "Fp8LinearMethod"),
    "fp8, one factor": Form(
        {"quant_method": "fp8", "activation_scheme": "static"}, _fp8_whole, "ignored_layers", "fp8", "Fp8LinearMethod"
    ),
    "modelopt fp8": Form(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        _fp8_whole, "ignore", "modelopt_fp8", "ModelOptFp8LinearMethod",
    ),
    "modelopt nvfp4": Form(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        _modelopt_fp4, "ignore", "modelopt_fp4", "ModelOptFp4LinearMethod",
    ),
    "compressed fp8": Form(
        _compressed("float-quantized", {"type": "float", **_ROWS}, {"type": "float", **_PER_TOKEN}),
        _fp8_rows, **_COMPRESSED,
    ),
    "compressed int8": Form(
        _compressed("int-quantized", {"type": "int", **_ROWS}, {"type": "int", **_PER_TOKEN}), _int8, **_COMPRESSED
    ),
    "compressed w4a16": Form(
        _compressed("pack-quantized", {"symmetric": True, **_FOUR_BITS}), _packed, **_COMPRESSED
    ),
    "compressed w4a16, zero points": Form(
        _compressed("pack-quantized", {"symmetric": False, **_FOUR_BITS}),
        lambda weight: _packed(weight, zero=True), **_COMPRESSED,
    ),
    "compressed nvfp4": Form(
        _compressed("nvfp4-pack-quantized", _NVFP4, {**_NVFP4, "dynamic": "local"}), _compressed_fp4, **_COMPRESSED
    ),
    "awq": Form(_AWQ, _as_awq, None, "awq_marlin", "AWQLinearMethod", only_layers=True),
    "awq, list": Form(_AWQ, _as_awq, "modules_to_not_convert", "awq_marlin", "AWQLinearMethod", only_layers=True),
    "gptq, 4 bits": Form(
        {**_GPTQ, "bits": 4}, _as_gptq(4), None, "gptq_marlin", "GPTQMarlinLinearMethod", only_layers=True
    ),
    "gptq, 8 bits": Form(
        {**_GPTQ, "bits": 8}, _as_gptq(8), None, "gptq_marlin", "GPTQMarlinLinearMethod", only_layers=True
    ),
}  # fmt: skip


def is_quantised(name: str, form: Form) -> bool:
    """Whether the tool stores this weight quantised: DFlash2's small projections never."""
    in_layer = ".self_attn." in name or ".mlp." in name
    return name.endswith("proj.weight") and in_layer or (name == "fc.weight" and not form.only_layers)


def write_form(folder: Path, form: Form, pair: str = "tiny-dense", drafter: str = "good") -> dict[str, Tensor]:
    """Write the drafter in this form, and return the plain weights that it means."""
    source, stored, plain = drafter_path(pair, drafter), dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = weight
        if is_quantised(name, form):
            module, parts = name.removesuffix(".weight"), form.stored(weight.float())
            del stored[name]
            stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
            plain[name] = weight_of(parts, form.config)
    config = json.loads((source / "config.json").read_text())
    declared: dict[str, Any] = dict(form.config)
    if form.ignored is not None:
        matrices = [name.removesuffix(".weight") for name, weight in plain.items() if weight.dim() == 2]
        declared[form.ignored] = [name for name in matrices if not is_quantised(f"{name}.weight", form)] or ["lm_head"]
    write_model(folder, {**config, "quantization_config": declared}, stored)
    return plain


def write_quantised(folder: Path, pair: str = "tiny-dense", form: str = "fp8, blocks") -> None:
    """Write ``folder/quantised`` and the plain drafter that it means, ``folder/plain``."""
    plain = write_form(folder / "quantised", FORMS[form], pair)
    config = json.loads((drafter_path(pair) / "config.json").read_text())
    write_model(folder / "plain", config, plain)
