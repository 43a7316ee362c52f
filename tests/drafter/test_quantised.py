"""A quantised drafter's weights equal those that its format's library reads; other formats are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("compressed_tensors")

from dataclasses import replace

from sglang_dflash.check.flags import parse as parse_flags
from sglang_dflash.check.machine import GPUS
from sglang_dflash.check.report import preflight
from sglang_dflash.drafter.checkpoint import ModelFiles, plain_view
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.dequantise import parse
from sglang_dflash.drafter.tensors import LoadReport
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.rules import judge
from sglang_dflash_lab.pairs import target_path
from tests.support.configs import WEIGHTS, launch_of
from tests.support.quantised import write_quantised

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantised"
LAYERS = sorted(FIXTURES.glob("*.safetensors"))
KINDS = ("quantised", "plain")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(folder: Path) -> dict[str, Tensor]:
    """The tensors of a drafter, by parameter and shard, as its loader gets them in a server."""
    files = ModelFiles(str(folder), dequantise=True)
    view = plain_view(files) or folder
    config = json.loads((view / "config.json").read_text())
    assert "quantization_config" not in config, "SGLang would build quantised layers"
    report = LoadReport(DrafterConfig.from_dict(config))
    placed = list(report.place(load_file(view / "model.safetensors").items()))
    report.check(complete=True)
    return {f"{name} {shard}": tensor for name, shard, tensor in placed}


def errors(folder: Path) -> list[str]:
    """Errors of ``check`` about a drafter's headers."""
    launch = replace(launch_of({}, dtype="float32"), drafter_files=ModelFiles(str(folder), dequantise=True))
    return [str(finding) for finding in judge(launch, WEIGHTS) if finding.level == "error"]


def test_the_loader_dequantises_and_memory_counts_the_plain_weights(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    assert not errors(tmp_path / "quantised")
    quantised, plain = (load(tmp_path / kind) for kind in KINDS)
    assert quantised.keys() == plain.keys()
    assert [key for key in plain if not torch.equal(quantised[key], plain[key])] == []
    weights = []
    for kind in KINDS:
        models = {"target": str(target_path("tiny-dense")), "drafter": str(tmp_path / kind)}
        memory = preflight(parse_flags(("--dtype", "bfloat16"), **models)[0], GPUS["h200"]).memory
        assert memory is not None
        weights.append(memory.served.sizing.drafter_weights)
    assert weights[0] == weights[1] > 0


@pytest.mark.parametrize("file", LAYERS, ids=lambda path: path.stem)
def test_a_layer_dequantises_as_in_the_tool_that_wrote_it(file: Path) -> None:
    tensors = load_file(file)
    plain = tensors.pop("plain")
    problems: list[str] = []
    read = dict(parse(declared_in(file)).plain(tensors.items(), {"layer.weight": tuple(plain.shape)}, problems))
    assert problems == []
    assert torch.equal(read["layer.weight"].to(plain.dtype), plain)


def declared_in(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as stored:
        if metadata := stored.metadata():
            return dict(json.loads(metadata["quantization_config"]))
    form, _, bits = file.stem.partition("-")
    declared = {"quant_method": form.partition("_")[0], "bits": int(bits or 4), "group_size": 32}
    return declared if form == "awq" else {**declared, "checkpoint_format": form}


def test_reads_model_optimizers_quantisation_file(tmp_path: Path) -> None:
    write_quantised(tmp_path, whole=True)
    folder = tmp_path / "quantised"
    shutil.copy(tmp_path / "plain" / "config.json", folder)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    written = {"producer": {"name": "modelopt", "version": "0.41.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(written))
    view = plain_view(ModelFiles(str(folder), dequantise=True))
    assert view is not None
    assert not (view / "hf_quant_config.json").exists(), "SGLang would build quantised layers"
    quantised, plain = (load(tmp_path / kind) for kind in KINDS)
    assert all(torch.equal(quantised[key], plain[key]) for key in plain)


_MLP = "layers.1.mlp.up_proj"
_HALF_BLOCKS = f"{_MLP}.weight_scale is [6, 2] of torch.float32, not [3, 1]"
_FP8, _FP8_ALONE = torch.float8_e4m3fn, "fc.weight is of torch.float8_e4m3fn, and config.json declares no quantisation"
BREAKS: list[tuple[str, str, Tensor | None, str]] = [
    ("plain", "fc.weight", torch.zeros(128, 384).to(_FP8), _FP8_ALONE),  # its bytes would be loaded as weights
    ("quantised", f"{_MLP}.weight_scale_inv", None, f"{_MLP} has weight, not"),
    ("quantised", f"{_MLP}.weight_scale_inv", torch.ones(6, 2), _HALF_BLOCKS),
    ("quantised", "fc.weight_scale_2", torch.ones(1), "unexpected: fc.weight_scale_2"),
    ("quantised", "layers.0.self_attn.k_scale", torch.ones(1), "layers.0.self_attn.k_scale"),  # of the K/V cache
    ("quantised", "fc.weight", torch.zeros(128, 384, dtype=torch.uint8), "fc has weight_scale, not"),
]


@pytest.mark.parametrize(("kind", "name", "tensor", "words"), BREAKS)
def test_a_misfit_is_one_error_in_check_and_in_the_loader(
    kind: str, name: str, tensor: Tensor | None, words: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path)
    folder = tmp_path / kind
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, folder / "model.safetensors")
    (found,) = errors(folder)
    assert words in found
    with pytest.raises(DFlashError) as raised:
        load(folder)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 32}, "g_idx whose groups are not of 32 columns"),
        ({"group_size": 128}, "groups of 128 columns do not divide a weight of 96"),
    ],
)
def test_groups_that_are_unequal_or_do_not_divide_a_row_are_refused(changes: dict[str, int], words: str) -> None:
    tensors = load_file(FIXTURES / "gptq-4.safetensors")
    del tensors["plain"]
    tensors["layer.g_idx"] = torch.zeros_like(tensors["layer.g_idx"])
    checkpoint = parse({"quant_method": "gptq", "bits": 4, **changes})
    with pytest.raises(DFlashError, match=words):
        list(checkpoint.plain(tensors.items(), {"layer.weight": (64, 96)}, []))


def test_a_named_layers_scheme_takes_precedence() -> None:
    four = {"weights": {"num_bits": 4, "group_size": 32}, "format": "pack-quantized"}
    eight = {"weights": {"num_bits": 8, "strategy": "channel"}, "format": "int-quantized"}
    groups = {"a": {**four, "targets": ["Linear"]}, "b": {**eight, "targets": ["re:.*down_proj"]}}
    checkpoint = parse({"quant_method": "compressed-tensors", "config_groups": groups, "format": "mixed-precision"})
    stored = {"weight": torch.ones(4, 32, dtype=torch.int8), "weight_scale": torch.ones(4, 1)}
    weights, problems = [(f"x.down_proj.{part}", each) for part, each in stored.items()], list[str]()
    assert dict(checkpoint.plain(weights, {"x.down_proj.weight": (4, 32)}, problems)).keys() == {"x.down_proj.weight"}
    assert problems == []


_CT = declared_in(FIXTURES / "compressed-w4a16.safetensors")
_NVFP4 = {"config_groups": {"group_0": {**_CT["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"}}}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**_CT, **_NVFP4}, "compressed-tensors in the format nvfp4-pack-quantized"),
    ({**_CT, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "scales for the K/V cache"),
    ({**_CT, "transform_config": {"config_groups": {"u": {}}}}, "a transform_config"),
    ({**_CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "a sparsity_config"),
    ({**_CT, "quantization_status": "frozen"}, "the status frozen"),
    ({**_CT, "config_groups": {"group_0": {"weights": {}}}}, "targets Field required"),
    ({**_MODELOPT, "kv_cache_quant_algo": "FP8"}, "modelopt with scales for the K/V cache (kv_cache_quant_algo)"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "the format e5m2"),
    ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "awq of 4 bits in the format gemv"),
    ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "awq of 8 bits"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "the format marlin"),
    ({"quant_method": "gptq", "bits": 5}, "gptq of 5 bits"),
    ({"bits": 4}, "unnamed"),
]


@pytest.mark.parametrize(("declared", "words"), REFUSED)
def test_an_unserved_quantisation_is_refused_by_name(declared: dict[str, Any], words: str) -> None:
    with pytest.raises(DFlashError) as raised:
        parse(declared)
    assert words in raised.value.problem
    assert "plain weights" in raised.value.remedy
