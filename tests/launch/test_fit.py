"""The published pairs on known GPUs: sizes, memory, and what fits."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS, asked_about
from sglang_dflash.check.report import Report, preflight
from sglang_dflash.drafter.formats import text_config
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.old_flags import modernise_argv
from sglang_dflash.launch.plan import DraftWindow, draft_window
from sglang_dflash.launch.sizes import target_kv_per_token
from tests.launch.commands import FOLDER as COMMANDS
from tests.support.cards import FOLDER, NAMES, card
from tests.support.configs import MISSING, card_pair, checked, drafter, memory_of, target, write_model
from tests.support.files import load_config, load_drafter, raise_first_error

TARGET_27B, DFLASH2 = card_pair("Qwen3.6-27B")["target"], COMMANDS / "qwen38-27b-dflash2"
CONTEXT = 262_144  # tokens of the longest request of each card's target
# The drafters' parameters as the publishers state them, in billions.
PUBLISHED = {"Qwen3-Coder-Next": 0.5, "Qwen3.5-27B": 2, "Qwen3.5-4B": 0.63, "Qwen3.6-27B": 2, "Qwen3.6-35B-A3B": 0.5}


@pytest.mark.parametrize("name", NAMES)
def test_the_published_drafters_have_their_published_sizes_and_the_pairs_fit_a_large_gpu(name: str) -> None:
    config = load_config(FOLDER / name / "target")
    shapes = expected_shapes(load_drafter(FOLDER / name / "drafter"))
    assert sum(map(math.prod, shapes.values())) == pytest.approx(PUBLISHED[name] * 1e9, rel=0.15)
    flags, _ = modernise_argv(card(name).arguments_for(**card_pair(name)))
    report = checked(name, *flags, on=asked_about(None, memory_gib=268))  # a B300
    assert [finding for finding in report.findings if finding.level == "error"] == []
    assert report.memory is not None and report.memory.running > 0
    text, served = text_config(config), report.memory.sizing
    assert served.target_kv == text["layer_types"].count("full_attention") * 2 * text["num_key_value_heads"] * 256 * 2
    padding = served.page * (served.target_kv + served.draft_kv)
    assert sum(report.memory.bytes.values()) <= report.memory.static_bytes + padding


def test_a_published_dflash2_drafter_has_its_published_size() -> None:
    shapes = expected_shapes(load_drafter(DFLASH2))
    size = 2 * sum(map(math.prod, shapes.values()))
    assert (len(shapes), round(size / 1e9, 2)) == (81, 3.85)

    def memory(*flags: str) -> Report:
        report = preflight(parse(flags, target=TARGET_27B, drafter=str(DFLASH2))[0], GPUS["h200"])
        assert report.memory is not None and not [each for each in report.findings if each.level == "error"]
        return report

    table = memory()
    assert table.memory and table.memory.sizing.block == 8 and table.memory.sizing.records
    assert table.memory.running == 47
    assert table.memory.sizing.drafter_weights == size
    # Selector, convolutions and the context projection are whole on every rank.
    parts = [name for name in shapes if "select" in name or "_conv" in name or name == "fc.weight"]
    whole = 2 * sum(math.prod(shapes[name]) for name in parts)
    eight = memory("--tp-size", "8").memory
    assert eight and eight.sizing.drafter_weights == pytest.approx((size - whole) / 8 + whole, rel=1e-3)


def test_a_prefill_server_has_no_verify_scratch() -> None:
    pools = checked("Qwen3.5-27B", "--disaggregation-mode", "prefill").memory
    assert pools is not None and pools.bytes["scratch"] == 0
    budget = (pools.static_bytes - pools.sizing.weights) * 0.9 / 1.9 - pools.sizing.state
    assert pools.state_slots == budget // pools.sizing.state  # SGLang's own division


# SmolLM2-135M (no head_dim) and Qwen3-0.6B; parameters, and K/V numbers of a token, by their cards.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": MISSING, "intermediate_size": 1536,
    "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "kv"),
    [(SMOLLM2, 134_515_008, 30 * 2 * 3 * 64), (QWEN3, 596_049_920, 28 * 2 * 8 * 128)],
    ids=["Llama", "Qwen3"],
)
def test_the_memory_of_a_dense_target_follows_from_its_configuration(
    config: dict[str, Any], parameters: int, kv: int, tmp_path: Path
) -> None:
    layers = {"num_target_layers": config["num_hidden_layers"]}
    ours = {key: config[key] for key in ("hidden_size", "vocab_size")}
    write_model(tmp_path / "target", target(**config))
    write_model(tmp_path / "drafter", drafter(**ours, **layers))
    stated = {"metadata": {"total_size": 2 * parameters}, "weight_map": {}}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(stated))
    flags = parse(["--dtype", "bfloat16"], target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"))[0]
    report = preflight(flags, GPUS["h100"])
    assert report.memory is not None, report.findings
    served = report.memory
    assert (served.sizing.target_weights, served.sizing.target_kv) == (2 * parameters, 2 * kv)
    heads = config["num_key_value_heads"]  # ranks beyond the KV heads hold copies
    assert [target_kv_per_token(target(**config), kv_bytes=2, tp_size=tp)[0] for tp in (heads, 2 * heads)] == [
        2 * kv // heads
    ] * 2
    each = 2 * kv + served.sizing.draft_kv
    left = report.memory.static_bytes - served.sizing.weights
    # All bytes are K/V, one token is padding.
    assert served.running == 48 and 0 <= left - served.tokens * each < 2 * each


@pytest.mark.parametrize("weighed", [True, False], ids=["headers", "no headers"])
def test_weights_that_cannot_fit_stop_a_server_if_headers_state_their_size(weighed: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "Qwen3-Coder-Next", tmp_path / "pair")
    if weighed:  # a file of 148.4 GiB that takes no disk: it has a header, and a hole
        (folder / "target" / "model.safetensors.index.json").unlink()
        shape = [79_674_391_296]
        header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2 * shape[0]]}}).encode()
        with (folder / "target" / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 2 * shape[0])
    pair = {"target": str(folder / "target"), "drafter": str(folder / "drafter")}
    report = preflight(parse([], **pair)[0], GPUS["h200"])
    assert [finding.about for finding in report.findings if finding.level == "error"] == ["running requests"]
    assert re.search(r"the weights of one rank take 149\.\d+ GiB of 119.34 GiB \(0.85 of the device\)", str(report))
    assert [advice.flag for advice in report.advice] == ["--tp-size 2"]
    assert report.memory is not None and report.memory.tokens == 0
    assert CliRunner().invoke(app, ["check", *pair.values(), "--gpu", "h200"]).exit_code == 2
    if weighed:
        with pytest.raises(DFlashError, match=r"weights of one rank take 149.* serve a quantised target"):
            raise_first_error(report.findings)
        raise_first_error(preflight(parse(("--tp-size", "2"), **pair)[0], GPUS["h200"]).findings)


@pytest.mark.parametrize(
    ("flags", "sliding", "expected"),
    [
        ((), 2048, 2047),
        ((), 4096, None),  # with tails, more slots than tokens that each request is left
        (("--disable-radix-cache",), 4096, 4095),  # without tails
        (("--enable-hierarchical-cache",), 2048, None),
        (("--disaggregation-mode", "prefill"), 2048, None),
        (("--disaggregation-mode", "prefill", "--speculative-draft-window-size", "64"), 2048, 2047),
    ],
)
def test_a_drafter_whose_layers_all_slide_has_a_window_where_it_saves_memory(
    flags: tuple[str, ...], sliding: int, expected: int | None, tmp_path: Path
) -> None:
    write_model(tmp_path, {**load_config(DFLASH2), "sliding_window": sliding})
    settings = parse(flags, target=TARGET_27B, drafter=str(tmp_path))[0]
    found = draft_window(Launch.of(settings, GPUS["h200"]))
    assert (found and found.tokens) == expected


@given(
    window=st.integers(1, 300),
    block=st.integers(1, 32),
    page=st.sampled_from([1, 16, 64]),
    context=st.integers(1, 1000),
    length=st.integers(0, 1000),
    lag=st.integers(0, 300),
)
def test_a_ring_holds_every_slot_until_the_prefix_is_cached(
    window: int, block: int, page: int, context: int, length: int, lag: int
) -> None:
    """SGLang reserves two blocks beyond the tokens, and the step in flight may commit one more."""
    drafts = DraftWindow(window, block, page, lag, cached=True)
    slots, length = drafts.ring_slots(context), min(length, context + block)  # the last block may run past the end
    assert slots % page == 0
    assert slots >= length + 3 * block - drafts.start(max(0, length - lag))
    assert slots < min(window, context + block) + 4 * block + lag + 2 * page
    assert drafts.tail_slots(context) >= length - drafts.start(length)
    assert drafts.tail_slots(context) % page == 0


@pytest.mark.parametrize(
    ("gpu", "flags", "each"),
    [
        ("a100", (), 16 * 5),  # the target in FlashInfer, the drafter in our kernel, which reads the slot table
        ("a100", ("--speculative-draft-attention-backend", "flashinfer"), 2 * 16 * 5),
        ("a100", ("--attention-backend", "triton"), 16 * 8),
        ("h200", (), 0),
        ("b200", (), 0),
    ],
)
def test_check_counts_the_indices_of_cuda_graphs(gpu: str, flags: tuple[str, ...], each: int) -> None:
    """Bytes per request and token of the context: positions, times an index and FlashInfer's mask."""
    memory = checked("Qwen3.5-4B", *flags, on=GPUS[gpu]).memory
    assert memory is not None and memory.sizing.indices == each * CONTEXT


def test_ranks_of_a_group_divide_attention_and_all_ranks_the_experts() -> None:
    name = "Qwen3.6-35B-A3B"
    alone, shared, dp = (
        memory_of(name, "--max-running-requests", "32", *flags).sizing
        for flags in ((), ("--tp-size", "4"), ("--tp-size", "4", "--attn-dp-size", "4", "--enable-dp-lm-head"))
    )
    for size in ("target_kv", "draft_kv", "drafter_weights", "scratch"):
        assert getattr(dp, size) == getattr(alone, size)
    assert shared.target_kv < dp.target_kv and dp.max_running == 8
    # Three quarters of the experts are elsewhere, and nothing else is.
    experts = 40 * 256 * 3 * 2048 * 512 * 2
    assert alone.target_weights - dp.target_weights == pytest.approx(experts * 3 / 4, rel=1e-6)
    assert shared.target_weights == alone.target_weights // 4
