"""Quantised drafters in SGLang's layers: names, lists of ignored layers, shapes and loaded values of every form.

A CPU has none of SGLang's kernels. The GPU is stubbed where SGLang reads its capability (``on_an_h100``). The layers,
their parameters and loaders are SGLang's. tests/rehearsal runs the kernel of block FP8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import marlin_utils
from sglang.srt.layers.quantization.awq import awq
from sglang.srt.model_loader import loader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_dflash.check.flags import parse as parse_flags
from sglang_dflash.check.machine import GPUS
from sglang_dflash.check.report import preflight
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.tensors import destination
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.plan import current
from sglang_dflash.launch.rules import judge
from sglang_dflash.model.drafter import DFlashDraftModel
from sglang_dflash_lab.pairs import target_path
from tests.support.configs import WEIGHTS, drafter, finding, launch_of, write_model
from tests.support.quantised import FORMS, Form, is_quantised, weight_of, write_form, write_quantised

pytestmark = pytest.mark.sglang
FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantised"
HOPPER = (9, 0)


def declared_in(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as stored:
        if metadata := stored.metadata():
            return dict(json.loads(metadata["quantization_config"]))
    form, _, bits = file.stem.partition("-")
    declared = {"quant_method": form.partition("_")[0], "bits": int(bits or 4), "group_size": 32}
    return declared if form == "awq" else {**declared, "checkpoint_format": form}


@pytest.mark.parametrize("file", sorted(FIXTURES.glob("*.safetensors")), ids=lambda path: path.stem)
def test_the_definition_reads_what_the_tools_wrote(file: Path) -> None:
    tensors = load_file(file)
    plain = tensors.pop("plain")
    found = weight_of({name.removeprefix("layer."): each for name, each in tensors.items()}, declared_in(file))
    assert torch.equal(found.to(plain.dtype), plain)


@pytest.fixture
def on_an_h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang builds the layers of an H100; no kernel runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)
    for module in (marlin_utils, loader):
        monkeypatch.setattr(module, "get_device_capability", lambda *_: HOPPER)
    monkeypatch.setattr(awq, "_is_cuda", True)
    monkeypatch.setattr(loader, "get_model_architecture", lambda _: (DFlashDraftModel, "DFlashDraftModel"))
    spec = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8, "device": "cpu"}
    ranks = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), 1)
    # Resolving arguments would load the CPU platform's plugins, which replace SGLang's kernels in this process.
    with (
        patch("sglang.srt.plugins.load_plugins", lambda: None),
        get_context().override_server_args(**spec),
        get_parallel().override(**ranks),
    ):
        yield


def launch(folder: Path, **changes: Any) -> Launch:
    return replace(launch_of({}, **{"dtype": "bfloat16", **changes}), drafter_files=ModelFiles(str(folder)))


def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DFlashDraftModel, str | None]:
    """The drafter's model as SGLang builds and loads it, and the method that SGLang resolves."""
    plan = SimpleNamespace(drafter=launch(folder).drafter, copies=False)
    monkeypatch.setattr(current, "worker", SimpleNamespace(plan=plan), raising=False)
    config = ModelConfig(str(folder), is_draft_model=True, dtype="bfloat16", is_draft_quantization_explicit=True)
    quantization = loader._get_quantization_config(config, LoadConfig())
    with set_default_torch_dtype(torch.bfloat16):
        model = DFlashDraftModel(config.hf_config, quantization)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model, config.quantization


def assert_loaded(model: DFlashDraftModel, plain: dict[str, Tensor], form: Form) -> None:
    """Each layer holds the weights of its parts, quantised where the tool quantises, otherwise plain."""
    parameters, fused = dict(model.named_parameters()), dict[str, dict[str, Tensor]]()
    for name in sorted(plain, key=lambda name: name.replace("q_proj", "a_proj")):  # Q before K and V
        fused.setdefault(destination(name)[0], {})[name] = plain[name]
    for name, parts in fused.items():
        expected = torch.cat([*parts.values()])
        if not any(is_quantised(part, form) for part in parts):
            assert torch.equal(parameters[name], expected.to(parameters[name].dtype)), name
            continue
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert type(layer.quant_method).__name__ == form.linear, name
        found = weight_of(dict(layer.named_parameters()), form.config, [len(weight) for weight in parts.values()])
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0, msg=name)  # AWQ's scales become bfloat16


@pytest.mark.usefixtures("on_an_h100")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_sglangs_layers_hold_the_stored_weights(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_form(tmp_path, form)
    assert [str(each) for each in judge(launch(tmp_path), WEIGHTS) if each.level in ("error", "builtin")] == []
    model, method = load(tmp_path, monkeypatch)
    assert method == form.method
    assert_loaded(model, plain, form)


@pytest.mark.usefixtures("on_an_h100")
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", ["fp8, blocks", "compressed w4a16", "modelopt nvfp4"])
def test_dflash2s_small_projections_and_names_with_a_prefix(
    name: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of tensors and of ignored layers may begin with ``model.``."""
    form = FORMS[name]
    plain = write_form(tmp_path, form, "tiny-hybrid", "dflash2")
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    ignored = config["quantization_config"][form.ignored]
    assert any(name.endswith("kernel_projection") for name in ignored)
    config["quantization_config"][form.ignored] = [f"{prefix}{name}" for name in ignored]
    write_model(tmp_path, config, {f"{prefix}{name}": tensor for name, tensor in tensors.items()})
    assert_loaded(load(tmp_path, monkeypatch)[0], plain, form)
    # SGLang's lists alone find the same layers.
    monkeypatch.setattr("sglang_dflash.launch.launch.plain_modules", lambda _: frozenset())
    assert_loaded(load(tmp_path, monkeypatch)[0], plain, form)


_UP, _Q = "layers.1.mlp.up_proj", "layers.0.self_attn.q_proj"
_E4M3 = torch.float8_e4m3fn
# change of a tensor, and what the errors of `check` (None: headers do not show it) and of the loader name
BREAKS: list[tuple[str, Tensor | None, str | None, str]] = [
    (f"{_UP}.weight_scale_inv", None, "mlp.up_proj", f"missing: {_UP}.weight_scale_inv"),
    (f"{_UP}.weight_scale_inv", torch.ones(6, 2), None, f"{destination(_UP)[0]}.weight_scale_inv (1) is [6, 2]"),
    ("fc.weight_scale_2", torch.ones(1), None, "unexpected: fc.weight_scale_2"),
    ("layers.0.self_attn.k_scale", torch.ones(1), "layers.0.self_attn.k_scale", "layers.0.self_attn.k_scale"),
    ("norm.weight", None, "missing: norm.weight", "missing: norm.weight"),
    ("norm.weight", torch.ones(3), "norm.weight is [3], not [128]", "norm.weight is [3], not [128]"),
    (f"{_Q}.weight", torch.ones(256, 128), *(f"{_Q}.weight is of torch.float32, in a quantised layer",) * 2),
]


@pytest.mark.usefixtures("on_an_h100")
@pytest.mark.parametrize(("name", "tensor", "of_check", "of_loader"), BREAKS)
def test_a_misfit_is_named(
    name: str,
    tensor: Tensor | None,
    of_check: str | None,
    of_loader: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_form(tmp_path, FORMS["fp8, blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, tmp_path / "model.safetensors")
    errors = [str(each) for each in judge(launch(tmp_path), WEIGHTS) if each.level == "error"]
    assert len(errors) == (of_check is not None) and all(of_check in each for each in errors if of_check)
    with pytest.raises(DFlashError) as raised:
        load(tmp_path, monkeypatch)
    assert of_loader in str(raised.value)


def test_parts_of_one_layer_are_stored_alike(tmp_path: Path) -> None:
    plain = write_form(tmp_path, FORMS["fp8, blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{_Q}.weight_scale_inv"]
    save_file({**tensors, f"{_Q}.weight": plain[f"{_Q}.weight"].bfloat16()}, tmp_path / "model.safetensors")
    (found,) = (str(each) for each in judge(launch(tmp_path), WEIGHTS) if each.level == "error")
    assert "qkv_proj is stored in unlike ways: q_proj as weight, k_proj as weight and weight_scale_inv" in found


def test_eight_bits_without_a_declaration_are_an_error(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"].to(_E4M3)}, tmp_path / "plain" / "model.safetensors")
    (found,) = (str(each) for each in judge(launch(tmp_path / "plain"), WEIGHTS) if each.level == "error")
    assert "fc.weight is of torch.float8_e4m3fn, and config.json declares no quantisation of it" in found


def test_check_counts_the_stored_bytes(tmp_path: Path) -> None:
    write_quantised(tmp_path)
    found = []
    for kind in ("quantised", "plain"):
        models = {"target": str(target_path("tiny-dense")), "drafter": str(tmp_path / kind)}
        memory = preflight(parse_flags(("--dtype", "bfloat16"), **models)[0], GPUS["h200"]).memory
        assert memory is not None
        found.append(memory.sizing.drafter_weights)
    tensors = load_file(tmp_path / "quantised" / "model.safetensors").values()
    assert found[0] == sum(each.nbytes for each in tensors) < 0.55 * found[1]


_CT = FORMS["compressed w4a16"].config
_MX = {"config_groups": {"group_0": {**_CT["config_groups"]["group_0"], "format": "mxfp4-pack-quantized"}}}
_MODELOPT, _GPTQ = FORMS["modelopt fp8"].config, FORMS["gptq, 4 bits"].config
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("builtin", {"quant_method": "bitsandbytes"}, "quantised by bitsandbytes"),
    ("builtin", {"quant_method": "mxfp4"}, "quantised by mxfp4"),
    ("builtin", {**_CT, **_MX}, "compressed-tensors (mxfp4-pack-quantized)"),
    ("builtin", {**_CT, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "(scales of the K/V cache)"),
    ("builtin", {**_MODELOPT, "kv_cache_quant_algo": "FP8"}, "modelopt (scales of the K/V cache)"),
    ("builtin", {**_MODELOPT, "quant_algo": "W4A8_AWQ"}, "modelopt (W4A8_AWQ)"),
    ("builtin", {"quant_method": "fp8", "fmt": "e5m2"}, "fp8 (e5m2)"),
    ("builtin", {"bits": 4}, "unnamed"),
    ("error", {**_CT, "transform_config": {"config_groups": {"u": {}}}}, "(rotated or sparse weights)"),
    ("error", {**_CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "(rotated or sparse weights)"),
    ("error", {**FORMS["awq"].config, "version": "GEMV"}, "awq (4 bits, gemv)"),
    ("error", {**FORMS["awq"].config, "bits": 8}, "awq (8 bits, gemm)"),
    ("error", {**_GPTQ, "bits": 3}, "gptq (3 bits, gptq, symmetric)"),
    ("error", {**_GPTQ, "sym": False}, "gptq (4 bits, gptq, asymmetric)"),
    ("error", {**_GPTQ, "checkpoint_format": "marlin"}, "gptq (4 bits, marlin, symmetric)"),
]


@pytest.mark.parametrize(("level", "declared", "words"), OTHERS)
def test_a_form_without_a_test_is_sglangs_workers_or_an_error(level: str, declared: dict[str, Any], words: str) -> None:
    found = finding("drafter's quantisation", launch_of(drafter(quantization_config=declared), dtype="bfloat16"))
    assert (found.level, words in found.value) == (level, True), found
    assert ("SGLang has no layers" in found.value) == (level == "error")


def test_model_optimizers_file_declares_too(tmp_path: Path) -> None:
    write_form(tmp_path, FORMS["modelopt fp8"])
    config = json.loads((tmp_path / "config.json").read_text())
    stored = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": "FP8", "exclude_modules": stored["ignore"]}
    written = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    found = launch(tmp_path).drafter
    assert found.quantization == "modelopt" and "fc" not in found.plain_modules
