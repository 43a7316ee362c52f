"""Drafters of every shape, with and without a draft window: the reference decoder's drafts and tokens, step by step.

The drafters have random weights in which attention weighs much, so that a wrong mask, window, rotation or head layout
changes their drafts. A bad draft changes no token, so comparing tokens alone would show nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dflash.launch.plan import context_window
from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.train import drafter, reference_decoder
from sglang_dflash_lab.train.drafter import FULL, SLIDING
from sglang_dflash_lab.train.reference_decoder import ReferenceDecoder
from tests.support.checkpoints import write_drafter
from tests.support.configs import write_model
from tests.support.files import load_drafter
from tests.support.generation import generate_all
from tests.support.prompts import corpus
from tests.support.servers import recorded_blocks, running, target_arguments, with_plugin, worker_info

pytestmark = pytest.mark.engine

PAIR, NEW_TOKENS, WINDOW = "tiny-dense", 24, 20


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 8}
CAPPED = {"output_multiplier": 0.25, "final_logit_softcapping": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
NARROW = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "block_size": 12}
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "target_layer_ids": (2,)}
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
ALL_SLIDING = {"layer_types": (SLIDING,) * 2, "sliding_window": WINDOW}
INTERLEAVED = {"layer_types": (SLIDING, FULL, SLIDING), "sliding_window": WINDOW}
THREE_TAPS = {"layer_types": (SLIDING, FULL), "sliding_window": WINDOW, "conv_kernel_size": 3}
TWO_WAYS = {"is_causal": False}
PUBLISHED = "DFlash2, as published: bidirectional sliding, narrower than its block"
# Changes to the plain drafter's configuration, further keys of its file, and the block size on the command line.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "one KV head, narrow heads, block size of the checkpoint": (NARROW, {}, None),
    "as many KV heads as heads, wide heads, one target layer": (WIDE, {}, 16),
    "all sliding, block size of the flag": (ALL_SLIDING, {}, 5),
    "interleaved, other heads": (INTERLEAVED | THREE, {}, 16),
    "causal full attention": ({}, {"is_causal": True}, 16),
    "bidirectional sliding attention": (ALL_SLIDING, TWO_WAYS, 16),
    "YaRN": ({}, {"rope_scaling": YARN}, 16),
    "DFlash2, full": (DFLASH2 | {"selector_top_k": 16}, {}, None),
    PUBLISHED: (DFLASH2 | ALL_SLIDING | {"block_size": 8}, TWO_WAYS, 5),
    "DFlash2, interleaved, three taps, capped logits": (DFLASH2 | CAPPED | THREE_TAPS, {}, 12),
    "DFlash2, blocks of two": (DFLASH2, {}, 2),
    "scaled input embeddings": ({}, {"input_embedding_scale": 8.0}, 16),
}
WINDOWS = {None: 1, 16: 1, 64: 16, 4096: 1}  # tokens of a draft window -> page that its reading begins on


def visible_where(
    causal: bool, layer_type: str, query: Tensor, key: Tensor, start: Tensor, sliding: int | None, window: int | None
) -> Tensor:
    """``pairs.drafter.visible`` with ``is_causal`` set for all layers; a sliding layer reads as far ahead as back."""
    if layer_type == SLIDING and sliding:
        near = (query - key).abs() < sliding
    else:
        near = drafter.visible(FULL, query, key, start, None, window)
    return near & (key <= query) if causal else near


def yarn_rotation(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """``pairs.drafter.rotate`` under YaRN."""
    parameters = {**YARN, "rope_theta": theta}
    config = Qwen3Config(head_dim=x.shape[-1], max_position_embeddings=256, rope_parameters=parameters)
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@pytest.mark.slow  # `make test` has the interleaved drafter: tests/worker/test_draft_window.py
@pytest.mark.parametrize(("name", "window"), list(itertools.product(SHAPES, WINDOWS)))
def test_drafts_equal_the_reference(
    name: str, window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fields, keys, flag), page, folder = SHAPES[name], WINDOWS[window], tmp_path / "drafter"
    write_drafter(folder, **fields)
    write_model(folder, {**json.loads((folder / "config.json").read_text()), **keys})
    width = flag or fields.get("block_size", 16)
    command = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(folder)]
    if flag:
        command += ["--speculative-num-draft-tokens", str(flag)]
    if window:
        command += ["--speculative-draft-window-size", str(window), "--page-size", str(page)]
    reads = context_window(window, load_drafter(folder))
    by_length = sorted(corpus(PAIR, 12, seed=4), key=len)
    prompts = [*by_length[2:5], by_length[10]]
    with running(tmp_path, *target_arguments(PAIR), *command, **with_plugin(tmp_path, "drafts")) as server:
        assert (worker_info(server)["block_size"], worker_info(server)["window"]) == (width, reads)
        answers = generate_all(server, prompts, len(prompts), NEW_TOKENS)  # in one batch: blocks have neighbours
    if "is_causal" in keys:
        monkeypatch.setattr(reference_decoder, "visible", functools.partial(visible_where, keys["is_causal"]))
    if "rope_scaling" in keys:
        monkeypatch.setattr(drafter, "rotate", yarn_rotation)
    monkeypatch.setattr(reference_decoder.DrafterRun, "input_scale", keys.get("input_embedding_scale", 1.0))
    decoder = ReferenceDecoder.load(target_path(PAIR), folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = decoder.decode(prompt, NEW_TOKENS, width, reads, page)
        drafted = [tuple(block[1:]) for _, block in recorded_blocks(tmp_path, answer.meta["id"])]
        assert answer.tokens == expected.tokens
        assert drafted[: len(expected.steps)] == [step.drafted for step in expected.steps]
