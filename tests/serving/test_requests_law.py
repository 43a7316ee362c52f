"""Sampled text has the target's law: 20,480 tokens a setting, against the probabilities of the target in transformers.

A wrong acceptance rule shifts a draft's probability by p (1 - p) or so, which is nearly 0 where the target is sure, as
a trained one mostly is. Hence a pair of random weights: the drafter drafts one token always, and a bias on that token
gives it a probability of 0.2 to 0.8, so that every rule must accept and reject all the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.plan.settings import COPIES_SWITCH as SWITCH
from sglang_dflash_lab.train.drafter import FULL
from tests.serving.sampled_law import assert_seeds_decided, p_of_one_and_two, sample
from tests.support.checkpoints import build, write_drafter
from tests.support.generation import Params
from tests.support.pair_servers import BASE, TRACKED, with_plugin, worker_info
from tests.support.servers import Server, running

pytestmark = pytest.mark.engine

VOCAB, DRAFT, BIAS = 32, 3, 3.5
PROMPTS, PROMPT_LENGTH, TEXTS, LENGTH = 16, 24, 20, 64
BLOCK = 4

SETTINGS: dict[str, Params] = {
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1": {"temperature": 1.0},
    "temperature 1.4": {"temperature": 1.4},
    "top-k": {"temperature": 1.4, "top_k": 7},
    "top-p": {"temperature": 1.4, "top_p": 0.8},
    "min-p": {"temperature": 1.4, "min_p": 0.05},
    "all filters": {"temperature": 1.0, "top_k": 12, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.1, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "penalties and filters": {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.1},
}
QUICK = ("penalties and filters",)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The target; its checkpoint is in ``name_or_path``. The embedding of ``DRAFT`` is what its LM head looks for."""
    model = build("qwen3_5", vocab_size=VOCAB)
    with torch.no_grad():
        model.model.embed_tokens.weight[DRAFT] = model.lm_head.weight[DRAFT]
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


@pytest.fixture(scope="module")
def drafter(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return constant_drafter(tmp_path_factory.mktemp("drafter"))


def constant_drafter(folder: Path, **fields: Any) -> Path:
    """A drafter whose layers add nothing: what comes out is the mask's embedding, so ``DRAFT`` is what it drafts.

    ``fields`` may add a selector, by which the drafts depend on the token before.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    layers = {"layer_types": (FULL,), "target_layer_ids": (0, 2), "num_target_layers": 4}
    tokens = {"vocab_size": VOCAB, "mask_token_id": DRAFT, "eos_token_id": 1}
    model = write_drafter(folder, **heads, **layers, **tokens, **fields, block_size=8)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        if model.candidate_selector is not None:
            model.candidate_selector.successor_codebook.mul_(20)  # the token before outweighs the logits
    model.save(folder)
    return folder


def arguments(target: Any, drafter: Path) -> tuple[str, ...]:
    pair = ("--model-path", target.name_or_path, "--speculative-draft-model-path", str(drafter))
    block = ("--speculative-num-draft-tokens", str(BLOCK))
    return (*pair, *BASE, *TRACKED, "--max-running-requests", "32", "--speculative-algorithm", "DFLASH", *block)


@pytest.fixture(scope="module")
def served(target: Any, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("dflash"), *arguments(target, drafter)) as server:
        yield server


PValues = Callable[[str, Tensor], tuple[float, float]]


@pytest.fixture
def p_values(record_property: Callable[[str, object], None]) -> PValues:
    """Test a setting's points, and write both p-values to the report of ``--junitxml``."""

    def find(name: str, points: Tensor) -> tuple[float, float]:
        found = p_of_one_and_two(points)
        record_property(name, " and ".join(f"{p:.3f}" if p > 1e-3 else f"{p:.1e}" for p in found))
        return found

    return find


def draw(server: Server, target: Any, name: str, *, seeded: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCAB, (PROMPTS, PROMPT_LENGTH), generator=generator).tolist()
    params = {**SETTINGS[name], "logit_bias": {str(DRAFT): BIAS}}
    return sample(server, target, prompts, params, texts=TEXTS, length=LENGTH, seeded=seeded, generator=generator)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS])
def test_sampled_text_has_the_targets_law(name: str, served: Server, target: Any, p_values: PValues) -> None:
    points, delays = draw(served, target, name, seeded=True)
    one, two = p_values(name, points)
    assert min(one, two) > 0.01, (one, two)
    assert_seeds_decided(delays)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["temperature 1", "top-p", "min-p"])
def test_so_has_text_without_a_seed(name: str, served: Server, target: Any, p_values: PValues) -> None:
    # These draws differ from run to run, so the bound is one false alarm in 10,000 runs.
    one, two = p_values(f"{name}, no seed", draw(served, target, name, seeded=False)[0])
    assert min(one, two) > 1e-4, (one, two)


@pytest.mark.slow
def test_so_has_text_of_copied_blocks(target: Any, drafter: Path, tmp_path: Path, p_values: PValues) -> None:
    """Without seeds, with which the text would be that of the test above; any match is copied."""
    (tmp_path / "copy_rule.json").write_text(json.dumps({"least": 2, "unsure": 1e9, "probability": False}))
    plugin = with_plugin(tmp_path, "copy_rule")
    with running(tmp_path, *arguments(target, drafter), **{SWITCH: "1"}, **plugin) as server:
        for name in ("temperature 1", "all filters", "penalties and filters"):
            before = worker_info(server)["copied_blocks_by_match_length"]
            one, two = p_values(f"{name}, no seed, copied blocks", draw(server, target, name, seeded=False)[0])
            assert min(one, two) > 1e-4, (name, one, two)
            copied = sum(worker_info(server)["copied_blocks_by_match_length"].values()) - sum(before.values())
            assert copied > 500, (name, copied)


@pytest.mark.slow
def test_so_has_text_after_drafts_that_a_selector_chose_by_the_draft_before(
    target: Any, tmp_path: Path, p_values: PValues
) -> None:
    selector = {"selector_rank": 8, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 16}
    (tmp_path / "drafter").mkdir()
    folder, plugin = constant_drafter(tmp_path / "drafter", **selector), with_plugin(tmp_path, "drafts")
    with running(tmp_path, *arguments(target, folder), **plugin) as server:
        name = "temperature 1"
        one, two = p_values(f"{name}, no seed, DFlash2", draw(server, target, name, seeded=False)[0])
    assert min(one, two) > 1e-4, (one, two)
    blocks = [json.loads(line)["block"] for line in (tmp_path / "drafts.jsonl").read_text().splitlines()]
    assert len({tuple(block[1:]) for block in blocks}) > 3, "the drafts do not depend on the token before"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["draw_twice", "keep_likely"])
def test_a_wrong_acceptance_rule_is_noticed(
    rule: str, target: Any, drafter: Path, tmp_path: Path, p_values: PValues
) -> None:
    with running(tmp_path, *arguments(target, drafter), **with_plugin(tmp_path, rule)) as server:
        for name in ("temperature 0.6", "temperature 1.4", "penalties"):
            one, two = p_values(f"wrong rule {rule}, {name}", draw(server, target, name, seeded=False)[0])
            assert max(one, two) < 1e-6, (name, one, two)
