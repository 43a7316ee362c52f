"""The drafter that most users serve today, Qwen3.8-27B's DFlash2, in small, under the flags of their command lines.

Blocks of 8; five layers, all of them sliding and, by ``is_causal``, bidirectional; a hybrid target. The weights are
those of the tiny pair's trained drafter: its two layers, and three copies of them that add little, so that drafts are
accepted.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.train import reference_decoder
from sglang_dflash_lab.train.drafter import SLIDING
from sglang_dflash_lab.train.reference_decoder import Decoded, ReferenceDecoder
from tests.drafter.test_drafter_shapes import drafts, visible_where
from tests.support.acceptance import LEAD, accept_length
from tests.support.checkpoints import assert_greedy
from tests.support.generation import generate_all
from tests.support.prompts import corpus
from tests.support.servers import changed_drafter, dflash_server, recorded_blocks, with_plugin

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAIR, BLOCK, WINDOW, NEW_TOKENS = "tiny-hybrid", 8, 48, 48
TRAINED, ADDED, WEIGHT = (0, 1), (0, 1, 1), 0.3  # layers, and the weight of what a copied one adds
FRACTION = ("--mem-fraction-static", "0.5")
PROMPTS = sorted(corpus(PAIR, 12, seed=5), key=len)[-4:]


def write_drafter(folder: Path) -> Path:
    layers = [*TRAINED, *ADDED]
    sliding = {"layer_types": [SLIDING] * len(layers), "sliding_window": WINDOW, "use_sliding_window": True}
    drafter = changed_drafter(PAIR, folder, num_hidden_layers=len(layers), is_causal=False, **sliding)
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"]["block_size"] = BLOCK
    (drafter / "config.json").write_text(json.dumps(config))
    weights = load_file(drafter / "model.safetensors")
    for layer, source in list(enumerate(layers))[len(TRAINED) :]:
        for name in [name for name in weights if name.startswith(f"layers.{source}.")]:
            added = WEIGHT if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weights[name.replace(f"layers.{source}.", f"layers.{layer}.")] = added * weights[name]
    save_file(weights, drafter / "model.safetensors", {"format": "pt"})
    return drafter


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def reference(drafter: Path) -> ReferenceDecoder:
    return ReferenceDecoder.load(target_path(PAIR), drafter)


@pytest.fixture(scope="module")
def expected(reference: ReferenceDecoder) -> list[Decoded]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_decoder, "visible", functools.partial(visible_where, False))
        found = [reference.decode(prompt, NEW_TOKENS, BLOCK) for prompt in PROMPTS]
    causal = reference.decode(PROMPTS[-1], NEW_TOKENS, BLOCK)
    assert drafts(found[-1]) != drafts(causal), "is_causal makes no difference here"
    assert min(step.lead for decoded in found for step in decoded.steps) > LEAD
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("--mamba-radix-cache-strategy", "extra_buffer", "--max-running-requests", "1"),
        # Without chunks SGLang reserves 24 GB for activations by default.
        (*("--disable-cuda-graph", "--disable-radix-cache", "--chunked-prefill-size", "-1"), *FRACTION),
    ],
    ids=" ".join,
)
def test_tokens_are_plain_decodings_and_drafts_the_references(
    flags: tuple[str, ...], drafter: Path, reference: ReferenceDecoder, expected: list[Decoded], tmp_path: Path
) -> None:
    plugin = with_plugin(tmp_path, "drafts")
    with dflash_server(PAIR, tmp_path, *flags, drafter=drafter, block=BLOCK, **plugin) as server:
        answers = generate_all(server, PROMPTS, len(PROMPTS), NEW_TOKENS)
        again = generate_all(server, [PROMPTS[-1]] * 2, 1, NEW_TOKENS)  # a cache of few states keeps the latest
    for prompt, answer, decoded in zip(PROMPTS, answers, expected, strict=True):
        assert_greedy(reference.target, prompt, answer.tokens)
        drafted = [tuple(block[1:]) for _, block in recorded_blocks(tmp_path, answer.meta["id"])]
        assert (answer.tokens, drafted[: len(decoded.steps)]) == (decoded.tokens, drafts(decoded))
        assert answer.meta["spec_verify_ct"] == len(decoded.steps)
    counts = [(each.meta["spec_verify_ct"], each.meta["spec_num_correct_drafts"]) for each in answers]
    assert accept_length(counts) > 2
    assert [answer.tokens for answer in again] == [answers[-1].tokens] * 2
    assert (again[-1].meta["cached_tokens"] > 0) == ("--disable-radix-cache" not in flags)
