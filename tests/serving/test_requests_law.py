"""Sampled text has the target's law: 20,480 tokens a setting, against the probabilities of the target in transformers.

A wrong acceptance rule shifts a draft's probability by p (1 - p) or so, which is nearly 0 where the target is sure, as
a trained one mostly is. Hence a pair of random weights: the drafter drafts one token always, and a bias on that token
gives it a probability of 0.2 to 0.8, so that every rule must accept and reject all the time.

A token x drawn from the law p falls, when p's tokens are laid side by side by falling probability, into an interval of
length p(x); a uniform point of that interval is uniform on [0, 1) exactly if x follows p, whatever the context
(Rosenblatt 1952). So every generated token is a draw to count, in bins of one token and of two successive ones. This
stays true of any selection that looks at nothing but the tokens before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash_lab.train.drafter import FULL
from tests.support.checkpoints import build, write_drafter
from tests.support.generation import Params, answers, tokens
from tests.support.probability import p_value
from tests.support.servers import BASE, TRACKED, WIDE_WIDTHS, Server, running, with_plugin, worker_info

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # quick, step by step: test_sampled_drafts.py

VOCAB, DRAFT, BIAS = 32, 3, 3.5
PROMPTS, PROMPT_LENGTH, TEXTS, LENGTH = 16, 24, 20, 64
BLOCK = 4
TEXTS_PER_REQUEST = 256  # a request with thousands outlasts any sensible timeout on a slow machine

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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The target; its checkpoint is in ``name_or_path``. The embedding of ``DRAFT`` is what its LM head looks for."""
    model = build(vocab_size=VOCAB)
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


PValues = Callable[..., tuple[float, float]]


@pytest.fixture
def p_values(target: Any, record_property: Callable[[str, object], None]) -> PValues:
    """Test a setting's points, and write both p-values to the report of ``--junitxml``."""

    def find(server: Server, name: str, kind: str = "no seed") -> tuple[float, float]:
        found = p_of_one_and_two(draw(server, target, SETTINGS[name], seeded=not kind))
        title = ", ".join(filter(None, (name, kind)))
        record_property(title, " and ".join(f"{p:.3f}" if p > 1e-3 else f"{p:.1e}" for p in found))
        return found

    return find


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_text_has_the_targets_law(name: str, served: Server, p_values: PValues) -> None:
    """Each text has a seed, so that every run counts the same. Seeded text: ``test_exact.py`` too."""
    assert min(p_values(served, name, "")) > 0.01


@pytest.mark.parametrize("name", ["temperature 1", "top-p", "min-p"])
def test_so_has_text_without_a_seed(name: str, served: Server, p_values: PValues) -> None:
    """These draws differ from run to run, so the bound is one false alarm in 10,000 runs, as below."""
    assert min(p_values(served, name)) > 1e-4


def test_so_has_text_of_copied_blocks(target: Any, drafter: Path, tmp_path: Path, p_values: PValues) -> None:
    """Any match is copied."""
    (tmp_path / "copy_rule.json").write_text(json.dumps({"least": 2, "margin": 99}))
    plugin = with_plugin(tmp_path, "copy_rule")
    with running(tmp_path, *arguments(target, drafter), *WIDE_WIDTHS, **plugin) as server:
        for name in ("temperature 1", "all filters", "penalties and filters"):
            before = worker_info(server)["copied_blocks_by_match_length"]
            assert min(p_values(server, name, "no seed, copied blocks")) > 1e-4, name
            copied = sum(worker_info(server)["copied_blocks_by_match_length"].values()) - sum(before.values())
            assert copied > 500, (name, copied)


def test_so_has_text_after_drafts_that_a_selector_chose_by_the_draft_before(
    target: Any, tmp_path: Path, p_values: PValues
) -> None:
    selector = {"selector_rank": 8, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 16}
    (tmp_path / "drafter").mkdir()
    folder, plugin = constant_drafter(tmp_path / "drafter", **selector), with_plugin(tmp_path, "drafts")
    with running(tmp_path, *arguments(target, folder), **plugin) as server:
        assert min(p_values(server, "temperature 1", "no seed, DFlash2")) > 1e-4
    blocks = [json.loads(line)["block"] for line in (tmp_path / "drafts.jsonl").read_text().splitlines()]
    assert len({tuple(block[1:]) for block in blocks}) > 3, "the drafts do not depend on the token before"


def test_a_wrong_acceptance_rule_is_noticed(target: Any, drafter: Path, tmp_path: Path, p_values: PValues) -> None:
    with running(tmp_path, *arguments(target, drafter), **with_plugin(tmp_path, "draw_twice")) as server:
        for name in ("temperature 0.6", "temperature 1.4", "penalties"):
            assert max(p_values(server, name, "wrong rule")) < 1e-6, name


def draw(server: Server, target: Any, params: Params, *, seeded: bool) -> Tensor:
    """Points ``[texts, LENGTH]`` inside the tokens' intervals, NaN off the law's support."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCAB, (PROMPTS, PROMPT_LENGTH), generator=generator).tolist()
    params = {**params, "logit_bias": {str(DRAFT): BIAS}, "max_new_tokens": LENGTH, "ignore_eos": True}
    each = [{**params, "sampling_seed": seed} if seeded else params for seed in range(PROMPTS * TEXTS)]
    inputs = [prompt for prompt in prompts for _ in range(TEXTS)]
    pieces = [slice(i, i + TEXTS_PER_REQUEST) for i in range(0, len(inputs), TEXTS_PER_REQUEST)]
    generated = torch.tensor(
        tokens([found for piece in pieces for found in answers(server, inputs[piece], each[piece])])
    )
    points = []
    for prompt, new in zip(prompts, generated.split(TEXTS), strict=True):
        ids = torch.cat((torch.tensor(prompt).expand(TEXTS, -1), new), dim=1)
        with torch.inference_mode():
            logits = target(ids).logits[:, PROMPT_LENGTH - 1 : -1].float()
        points.append(uniform_points(law(logits, new, params), new, generator))
    return torch.cat(points)


def uniform_points(probs: Tensor, texts: Tensor, generator: torch.Generator) -> Tensor:
    rank_of = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    own = texts[..., None]
    own_prob = probs.gather(2, own)[..., 0]
    above = probs.where(rank_of < rank_of.gather(2, own), 0.0).sum(dim=-1)
    inside = own_prob * torch.rand(texts.shape, generator=generator, dtype=torch.float64)
    return (above + inside).where(own_prob > 0, torch.nan)


def law(logits: Tensor, texts: Tensor, params: Params) -> Tensor:
    """float64 [texts, length, V]: what the request's parameters make of the target's logits."""
    logits = logits.double()
    seen = torch.nn.functional.one_hot(texts, logits.shape[-1])
    count = seen.cumsum(dim=1) - seen
    logits = logits - params.get("frequency_penalty", 0) * count - params.get("presence_penalty", 0) * (count > 0)
    scale = torch.where(count > 0, params.get("repetition_penalty", 1.0), 1.0)
    logits = torch.where(logits < 0, logits * scale, logits / scale)
    for token, bias in params.get("logit_bias", {}).items():
        logits[..., int(token)] += bias
    probs = torch.softmax(logits / params["temperature"], dim=-1)
    ranked, order = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(ranked.shape[-1])
    keep = ranks < params.get("top_k", len(ranks))
    keep = keep & (ranked.cumsum(dim=-1) - ranked <= params.get("top_p", 1.0) + 1e-12)
    keep = keep & (ranked >= params.get("min_p", 0.0) * ranked[..., :1])
    kept = torch.zeros_like(probs).scatter(-1, order, ranked.where(keep, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)


def p_of_one_and_two(points: Tensor) -> tuple[float, float]:
    """Chi-square p-values of the single points in 40 bins and of successive pairs in 10 x 10."""
    found = points.flatten()
    assert found.numel() >= 20_000, found.numel()
    # The server's logits differ from transformers' in the last bits, so one on a filter's edge may be off the support.
    assert found.isnan().double().mean() < 1e-3
    single = found[~found.isnan()]
    pairs = found[: found.numel() // 2 * 2].view(-1, 2)
    pairs = (pairs[~pairs.isnan().any(dim=1)] * 10).long().clamp(max=9)
    counts = torch.bincount((single * 40).long().clamp(max=39), minlength=40)
    pair_counts = torch.bincount(pairs[:, 0] * 10 + pairs[:, 1], minlength=100)
    return p_value(counts, torch.ones(40) / 40), p_value(pair_counts, torch.ones(100) / 100)
