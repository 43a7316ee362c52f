from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.drafter.checkpoint import ModelFiles, TensorHeader
from sglang_dflash.drafter.dequantise import set_aside
from sglang_dflash.errors import DFlashError, Finding, judge
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import CPU, UNKNOWN_GPU, Machine
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pair_rules import TEXT, WEIGHTS
from sglang_dflash.plan.rules import check_backends, torch_cuda
from sglang_dflash.plan.settings import Settings
from tests.support.broken_pairs import write_tensors
from tests.support.configs import drafter, pair_of

HOPPER = Machine("gpu", "NVIDIA H200", 141 << 30, (9, 0))
BLACKWELL = Machine("gpu", "NVIDIA B200", 180 << 30, (10, 0))
WORKSTATION = Machine("gpu", "NVIDIA RTX PRO 6000", 96 << 30, (12, 0))
AMPERE = Machine("gpu", "NVIDIA A100", 80 << 30, (8, 0))


def options(*flags: str) -> Settings:
    return parse(flags, target="t", drafter="d")[0]


def backends(machine: Machine, *flags: str, hybrid: bool = True) -> list[Finding]:
    return list(check_backends(options(*flags), machine, hybrid=hybrid))


class TestBackends:
    @pytest.mark.parametrize(
        ("machine", "flag", "name", "fits"),
        [
            (HOPPER, "--attention-backend", "fa3", True),
            (AMPERE, "--attention-backend", "fa3", True),
            (BLACKWELL, "--attention-backend", "fa3", False),
            (WORKSTATION, "--attention-backend", "fa3", False),
            (BLACKWELL, "--attention-backend", "trtllm_mha", True),
            (HOPPER, "--attention-backend", "trtllm_mha", True),
            (AMPERE, "--attention-backend", "trtllm_mha", False),
            (BLACKWELL, "--speculative-draft-attention-backend", "fa4", True),
            (WORKSTATION, "--speculative-draft-attention-backend", "fa4", False),
            (AMPERE, "--attention-backend", "triton", True),
        ],
    )
    def test_a_backend_is_held_against_the_gpu(self, machine: Machine, flag: str, name: str, fits: bool) -> None:
        (finding,) = backends(machine, flag, name)
        assert (finding.level == "ok") is fits
        if not fits:
            assert name in finding.value and machine.name in finding.value
            assert flag in finding.remedy

    @pytest.mark.parametrize("machine", [CPU, UNKNOWN_GPU])
    def test_without_a_known_gpu_nothing_is_held_against_it(self, machine: Machine) -> None:
        assert [finding.level for finding in backends(machine, "--attention-backend", "fa3")] == ["ok"]

    @pytest.mark.parametrize(
        ("flags", "slides", "machine", "instead"),
        [
            (("--speculative-draft-attention-backend", "flashinfer"), True, HOPPER, "fa3"),
            (("--attention-backend", "flashinfer"), True, BLACKWELL, "triton"),
            (("--attention-backend", "flashinfer"), True, UNKNOWN_GPU, "triton"),
            (("--attention-backend", "flashinfer"), False, HOPPER, None),
            (("--attention-backend", "flashinfer", "--speculative-draft-attention-backend", "fa3"), True, HOPPER, None),
            ((), True, HOPPER, None),
        ],
    )
    def test_flashinfer_waits_at_every_step_of_a_drafter_that_slides(
        self, flags: tuple[str, ...], slides: bool, machine: Machine, instead: str | None
    ) -> None:
        found = list(check_backends(options(*flags), machine, hybrid=True, slides=slides))
        warnings = [finding.remedy for finding in found if "waits" in finding.value]
        assert warnings == ([f"set --speculative-draft-attention-backend {instead}"] if instead else [])

    def test_flashinfers_linear_decode_on_blackwell_needs_bfloat16_states(self) -> None:
        flags = ("--linear-attn-decode-backend", "flashinfer")
        assert options(*flags).needs_bfloat16_states(BLACKWELL)
        assert not options(*flags).needs_bfloat16_states(HOPPER)
        assert not options(*flags).needs_bfloat16_states(UNKNOWN_GPU)
        assert not options(*flags, "--mamba-ssm-dtype", "bfloat16").needs_bfloat16_states(BLACKWELL)
        assert [finding.level for finding in backends(BLACKWELL, *flags)] == ["warn"]

    @pytest.mark.parametrize("flag", ["--linear-attn-verify-backend", "--linear-attn-decode-backend"])
    def test_flashinfer_on_blackwell_takes_no_other_dtype_of_states(self, flag: str) -> None:
        """A verify in FlashInfer's kernel needs what a decode needs, with a Triton decode too."""
        flags = (flag, "flashinfer")
        assert [each.level for each in backends(BLACKWELL, *flags)] == ["warn"]
        assert options(*flags).needs_bfloat16_states(BLACKWELL)  # the server sets it
        assert backends(BLACKWELL, *flags, "--mamba-ssm-dtype", "bfloat16") == []
        [error] = backends(BLACKWELL, *flags, "--mamba-ssm-dtype", "float32")
        assert error.level == "error" and flag in error.value and "float32" in error.value
        assert backends(HOPPER, *flags) == []

    @pytest.mark.parametrize(("cuda", "level"), [("12.9", "error"), ("13.0", "ok"), (None, "warn")])
    @pytest.mark.parametrize("flag", ["--linear-attn-prefill-backend", "--linear-attn-backend"])
    def test_flashinfers_linear_prefill_on_blackwell_needs_cuda_13(
        self, flag: str, cuda: str | None, level: str
    ) -> None:
        args = options(flag, "flashinfer", "--mamba-ssm-dtype", "bfloat16")
        [finding] = check_backends(args, replace(BLACKWELL, source="nvidia-smi"), hybrid=True, cuda=cuda)
        assert finding.level == level and (cuda or "unknown") in finding.value
        [elsewhere] = check_backends(args, BLACKWELL, hybrid=True, cuda=cuda)
        assert elsewhere.level == "warn"  # the torch of another machine
        assert not list(check_backends(args, HOPPER, hybrid=True, cuda=cuda))

    @pytest.mark.sglang
    def test_the_rules_of_linear_backends_are_sglangs(self) -> None:
        pytest.importorskip("sglang")
        from sglang.srt.arg_groups import attention_hook

        source = " ".join(inspect.getsource(attention_hook.handle_linear_attn_backend).split())
        on_blackwell = "and get_platform().is_cuda and torch.cuda.get_device_capability()[0] >= 10"
        bfloat16 = f'== "flashinfer" and cfg.mamba_ssm_dtype != "bfloat16" {on_blackwell} ): raise ValueError'
        for rule in (
            "decode = cfg.linear_attn_decode_backend or cfg.linear_attn_backend",
            f"decode {bfloat16}",
            "verify = cfg.linear_attn_verify_backend",
            f"verify {bfloat16}",
            "prefill = cfg.linear_attn_prefill_backend or cfg.linear_attn_backend",
            f'prefill == "flashinfer" {on_blackwell} and cuda_major < 13 ): raise ValueError',
        ):
            assert rule in source

    @pytest.mark.parametrize(
        ("line", "cuda"), [("= '12.9'", "12.9"), (": Optional[str] = '13.0'", "13.0"), ("= None", None)]
    )
    def test_torchs_cuda_is_read_without_importing_torch(
        self, line: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "version.py").write_text(f"__version__ = '2.14.1'\ncuda{line}\nhip = '6.4'\n")
        found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr("importlib.util.find_spec", lambda _: found)
        assert torch_cuda() == cuda


class TestFiles:
    def test_headers_are_read_without_the_weights(self, tmp_path: Path) -> None:
        header = json.dumps(
            {"__metadata__": {}, "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
        ).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
        (tmp_path / "config.json").write_text("{}")
        assert ModelFiles(str(tmp_path)).tensors == {"a": TensorHeader("BF16", (2, 3))}
        assert TensorHeader("F4", (4, 2)).num_bytes == 4

    def test_no_file_is_none(self, tmp_path: Path) -> None:
        assert ModelFiles(str(tmp_path)).tensors is None
        assert ModelFiles(str(tmp_path)).json("tokenizer.json") is None

    def test_a_hub_that_refuses_is_not_a_missing_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A drafter served without its mask embedding would draft badly without a word."""
        hub = pytest.importorskip("huggingface_hub")

        def refuse(*_: Any, **__: Any) -> str:
            raise ConnectionError("no route")

        monkeypatch.setattr(hub, "snapshot_download", refuse)
        with pytest.raises(DFlashError, match="no config.json found for z-lab/tiny"):
            ModelFiles("z-lab/tiny").path("mask_embedding.pt")

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The hub's cache of z-lab/tiny, with a configuration and weights, and no hub."""
        constants = pytest.importorskip("huggingface_hub.constants")
        cache = tmp_path / "models--z-lab--tiny"
        snapshot = cache / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(COMMIT)
        (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        write_tensors(snapshot, {"a": (2, 3)})
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return cache

    def test_a_hub_id_is_read_from_the_local_cache(self, cache: Path) -> None:
        files = ModelFiles("z-lab/tiny")
        assert not files.is_local
        assert files.config == {"model_type": "qwen3"}
        assert files.tensors == {"a": TensorHeader("F32", (2, 3))}

    @pytest.mark.parametrize("file", ["mask_embedding.pt", "hf_quant_config.json", "chat_template.jinja"])
    def test_without_the_hub_a_file_is_absent_only_if_the_cache_lists_the_models_files(
        self, cache: Path, file: str
    ) -> None:
        with pytest.raises(DFlashError, match="the local cache of z-lab/tiny may lack files") as error:
            ModelFiles("z-lab/tiny").path(file)
        assert "`hf download z-lab/tiny`" in error.value.remedy
        folder = cache / "snapshots" / COMMIT
        assert str(folder) in error.value.remedy and ModelFiles(str(folder)).path(file) is None
        write_listing(cache, "config.json", file)
        with pytest.raises(DFlashError, match="the local cache of z-lab/tiny may lack files"):
            ModelFiles("z-lab/tiny").path(file)

    def test_without_the_hub_the_listing_of_a_downloaded_snapshot_shows_what_the_model_lacks(self, cache: Path) -> None:
        write_listing(cache, "config.json", "model.safetensors")
        assert ModelFiles("z-lab/tiny").path("mask_embedding.pt") is None
        assert ModelFiles("z-lab/tiny", dequantise=True).config == {"model_type": "qwen3"}
        with pytest.raises(DFlashError, match="no config.json found for z-lab/other"):
            ModelFiles("z-lab/other").path("mask_embedding.pt")


COMMIT = "0" * 40


def write_listing(cache: Path, *files: str) -> None:
    """What the hub's client writes when it downloads a snapshot."""
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

    write_tree_cache(str(cache), COMMIT, {file: TreeCacheEntry(size=1, blob_id="0" * 40) for file in files})


def text_findings(tmp_path: Path, tokenizer: Any = None, template: str = "", own: Any = None) -> dict[str, Finding]:
    for name, content in (("target", tokenizer), ("drafter", own)):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
    if template:
        (tmp_path / "target" / "chat_template.jinja").write_text(template)
    pair = Pair(ModelFiles(str(tmp_path / "target")), ModelFiles(str(tmp_path / "drafter")))
    vars(pair).update(drafter=pair_of(drafter()).drafter)
    return {about: judge(about, rule, Settings(), pair) for about, rule in TEXT.items()}


def tokenizer(content: str | None = None, words: dict[str, int] | None = None) -> dict[str, Any]:
    added = [] if content is None else [{"id": 900, "content": content}]
    return {"added_tokens": added, "model": {"vocab": words or {}}}


class TestText:
    def test_the_targets_own_tokenizer_and_template_are_fine(self, tmp_path: Path) -> None:
        found = text_findings(tmp_path, tokenizer("<|MASK|>"), "{{ messages }}")
        assert {finding.level for finding in found.values()} == {"ok"}
        assert found["mask token's name"].value == "<|MASK|>"

    def test_an_unnamed_mask_token_is_a_free_row(self, tmp_path: Path) -> None:
        assert "unused" in text_findings(tmp_path, tokenizer())["mask token's name"].value

    @pytest.mark.parametrize("known", [tokenizer("<|im_end|>"), tokenizer(words={"hello": 900})])
    def test_a_mask_token_that_texts_contain_is_doubtful(self, tmp_path: Path, known: Any) -> None:
        assert text_findings(tmp_path, known)["mask token's name"].level == "warn"

    def test_a_copy_of_the_tokenizer_may_be_spelled_otherwise(self, tmp_path: Path) -> None:
        found = text_findings(tmp_path, {**tokenizer("<|MASK|>"), "version": "1.0"}, own=tokenizer("<|MASK|>"))
        assert found["tokenizer"].level == "ok"

    def test_another_tokenizer_is_an_error(self, tmp_path: Path) -> None:
        found = text_findings(tmp_path, tokenizer(), own=tokenizer("<|MASK|>"))
        assert found["tokenizer"].level == "error"

    def test_a_missing_template_is_doubtful_and_thinking_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        assert text_findings(tmp_path / "a", tokenizer())["chat template"].level == "warn"
        told = text_findings(tmp_path / "b", tokenizer(), "{% if enable_thinking %}")
        assert "thinking" in told["chat template"].value


class TestDtypes:
    @pytest.mark.parametrize(
        ("stated", "flag", "served"),
        [
            ("bfloat16", "auto", "bfloat16"),
            ("float32", "auto", "float16"),
            (None, "auto", "float16"),
            ("float32", "float32", "float32"),
            ("bfloat16", "half", "float16"),
        ],
    )
    def test_what_sglang_serves_in(self, stated: str | None, flag: str, served: str) -> None:
        assert pair_of(drafter(), {"dtype": stated}).served_dtype(Settings(dtype=flag)) == served

    @pytest.mark.parametrize(("dtype", "level"), [("float16", "warn"), ("bfloat16", "ok")])
    def test_serving_in_float16_is_a_warning(self, dtype: str, level: str) -> None:
        assert weights(drafter(), dtype=dtype)["dtype"].level == level

    def test_a_drafter_is_dequantised_unless_a_flag_selects_quantised_layers(self) -> None:
        config = set_aside(drafter(quantization_config={"quant_method": "fp8"}), None)
        finding = weights(config, dtype="bfloat16")["quantisation"]
        assert (finding.level, finding.value) == ("ok", "target none, drafter fp8, dequantised to bfloat16 when loaded")
        finding = weights(config, speculative_draft_model_quantization="fp8")["quantisation"]
        assert finding.level == "warn"
        assert "--speculative-draft-model-quantization fp8" in finding.value


def weights(config: dict[str, Any], **settings: Any) -> dict[str, Finding]:
    return {about: judge(about, rule, Settings(**settings), pair_of(config)) for about, rule in WEIGHTS.items()}
