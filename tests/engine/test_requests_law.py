"""Sampled text has the target's law: 20,480 tokens a setting, against the probabilities of the target in transformers.

A token x drawn from the law p falls, when p's tokens are laid side by side by falling probability, into an interval of
length p(x); a uniform point of that interval is uniform on [0, 1) exactly if x follows p, whatever the context
(Rosenblatt 1952). So every generated token is a draw to count, in bins of one token and of two successive ones.

A wrong acceptance rule shifts a draft's probability by p (1 - p) or so, which is nearly 0 where the target is sure, as
a trained one mostly is. Hence a pair of random weights: the drafter drafts one token always, and a bias on that token
gives it a probability of 0.2 to 0.8, so that every rule must accept and reject all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import build
from dflash import BASE, TRACKED
from requests_of import Params, answers, tokens
from serving import Server, running
from torch import Tensor

from sglang_dflash.ops import token_hash
from sglang_dflash.pairs.drafter import FULL, Drafter, DrafterConfig
from tests.chi_square import p_value

VOCAB, DRAFT, BIAS = 32, 3, 3.5
PROMPTS, PROMPT_LENGTH, TEXTS, LENGTH = 16, 24, 20, 64
BLOCK = 4
WRONG_RULE = str(Path(__file__).parent / "wrong_rule")

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
QUICK = ("temperature 1", "penalties and filters")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The target; its checkpoint is in ``name_or_path``. The embedding of ``DRAFT`` is what its LM head looks for."""
    model = build("qwen3_5", VOCAB)
    with torch.no_grad():
        model.model.embed_tokens.weight[DRAFT] = model.lm_head.weight[DRAFT]
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


@pytest.fixture(scope="module")
def drafter(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter whose layers add nothing: what comes out is the mask's embedding, so ``DRAFT`` is what it drafts."""
    config = DrafterConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, layer_types=(FULL,), sliding_window=None, block_size=8, mask_token_id=DRAFT,
        target_layer_ids=(0, 2), num_target_layers=4, max_position_embeddings=2048, rope_theta=1e4, rms_norm_eps=1e-6,
        eos_token_id=1,
    )  # fmt: skip
    model = Drafter(config)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    folder = tmp_path_factory.mktemp("drafter")
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


@dataclass(frozen=True)
class Sample:
    """What a setting generated.

    Attributes:
        points: [texts, LENGTH], uniform if the text follows the target's law; NaN off the law's support.
        delays: [texts, LENGTH], how much later than the winner (1.0: not at all) the emitted token came in the race
            that its seed decides; empty without seeds.
    """

    points: Tensor
    delays: Tensor


def sample(server: Server, target: Any, params: Params, *, seeded: bool) -> Sample:
    common = {"max_new_tokens": LENGTH, "ignore_eos": True, "logit_bias": {str(DRAFT): BIAS}, **params}
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCAB, (PROMPTS, PROMPT_LENGTH), generator=generator).tolist()
    seeds = torch.arange(PROMPTS * TEXTS)
    each = [{**common, "sampling_seed": seed} if seeded else common for seed in seeds.tolist()]
    found = tokens(answers(server, [prompt for prompt in prompts for _ in range(TEXTS)], each))
    points, delays = [], []
    for prompt, texts, own in zip(prompts, torch.tensor(found).split(TEXTS), seeds.split(TEXTS), strict=True):
        ids = torch.cat((torch.tensor(prompt).expand(TEXTS, -1), texts), dim=1)
        with torch.inference_mode():
            logits = target(ids).logits[:, len(prompt) - 1 : -1].float()
        probs = law(logits, texts, params)
        points.append(uniform_points(probs, texts, generator))
        if seeded:
            delays.append(race_delays(probs, texts, own, len(prompt) - 1))
    return Sample(torch.cat(points), torch.cat(delays) if seeded else torch.empty(0))


def uniform_points(probs: Tensor, texts: Tensor, generator: torch.Generator) -> Tensor:
    rank_of = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    own = texts[..., None]
    own_prob = probs.gather(2, own)[..., 0]
    above = probs.where(rank_of < rank_of.gather(2, own), 0.0).sum(dim=-1)
    inside = own_prob * torch.rand(texts.shape, generator=generator, dtype=torch.float64)
    return (above + inside).where(own_prob > 0, torch.nan)


def race_delays(probs: Tensor, texts: Tensor, seeds: Tensor, first_position: int) -> Tensor:
    """Plain decoding's draw, redone: the token of least -log(u) / p wins (:func:`sglang_dflash.ops.seeded_draw`)."""
    rows, vocab = texts.numel(), probs.shape[-1]
    positions = (first_position + torch.arange(LENGTH)).repeat(TEXTS)
    uniform = (token_hash(seeds.repeat_interleave(LENGTH), positions, torch.arange(vocab)).double() + 0.5) * 2.0**-32
    times = -uniform.log() / probs.view(rows, vocab)
    return (times.gather(1, texts.view(rows, 1))[:, 0] / times.min(dim=1).values).view_as(texts)


def law(logits: Tensor, texts: Tensor, params: Params) -> Tensor:
    """float64 [texts, LENGTH, V]: what the request's parameters make of the target's logits."""
    logits = logits.double()
    seen = torch.nn.functional.one_hot(texts, logits.shape[-1])
    count = seen.cumsum(dim=1) - seen
    logits = logits - params.get("frequency_penalty", 0) * count - params.get("presence_penalty", 0) * (count > 0)
    scale = torch.where(count > 0, params.get("repetition_penalty", 1.0), 1.0)
    logits = torch.where(logits < 0, logits * scale, logits / scale)
    logits[..., DRAFT] += BIAS
    probs = torch.softmax(logits / params["temperature"], dim=-1)
    ranked, order = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(ranked.shape[-1])
    keep = ranks < params.get("top_k", len(ranks))
    keep = keep & (ranked.cumsum(dim=-1) - ranked <= params.get("top_p", 1.0) + 1e-12)
    keep = keep & (ranked >= params.get("min_p", 0.0) * ranked[..., :1])
    kept = torch.zeros_like(probs).scatter(-1, order, ranked.where(keep, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)


def p_of_one_and_two(found: Tensor) -> tuple[float, float]:
    """Chi-square p-values of the single points in 40 bins and of successive pairs in 10 x 10."""
    assert found.numel() >= 20_000
    # The server's logits differ from transformers' in the last bits, so one on a filter's edge may be off the support.
    assert found.isnan().double().mean() < 1e-3
    single = found[~found.isnan()]
    pairs = found.view(-1, 2)
    pairs = (pairs[~pairs.isnan().any(dim=1)] * 10).long().clamp(max=9)
    counts = torch.bincount((single * 40).long().clamp(max=39), minlength=40)
    pair_counts = torch.bincount(pairs[:, 0] * 10 + pairs[:, 1], minlength=100)
    return p_value(counts, torch.ones(40) / 40), p_value(pair_counts, torch.ones(100) / 100)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS])
def test_sampled_text_has_the_targets_law(
    name: str, served: Server, target: Any, record_property: Callable[[str, object], None]
) -> None:
    found = sample(served, target, SETTINGS[name], seeded=True)
    one, two = p_of_one_and_two(found.points)
    record_property(name, f"{one:.3f} {two:.3f}")
    assert min(one, two) > 0.01, (one, two)
    # Not only the law: each token is the very one that plain decoding draws with this seed, save where two tokens
    # arrive at the same moment within the rounding of the logits (or one is on a filter's edge, and never arrives).
    late = found.delays[found.delays > 1.001]
    assert late.isinf().all() and len(late) < 1e-3 * found.delays.numel(), late


@pytest.mark.slow
@pytest.mark.parametrize("name", ["temperature 1", "top-p", "min-p"])
def test_so_has_text_without_a_seed(
    name: str, served: Server, target: Any, record_property: Callable[[str, object], None]
) -> None:
    # These draws differ from run to run, so the bound is one false alarm in 10,000 runs.
    one, two = p_of_one_and_two(sample(served, target, SETTINGS[name], seeded=False).points)
    record_property(f"{name}, no seed", f"{one:.3f} {two:.3f}")
    assert min(one, two) > 1e-4, (one, two)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["draw_twice", "keep_likely"])
def test_a_wrong_acceptance_rule_is_noticed(
    rule: str, target: Any, drafter: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with running(tmp_path, *arguments(target, drafter), PYTHONPATH=WRONG_RULE, WRONG_RULE=rule) as server:
        for name in ("temperature 0.6", "temperature 1.4", "penalties"):
            one, two = p_of_one_and_two(sample(server, target, SETTINGS[name], seeded=False).points)
            record_property(f"{rule}, {name}", f"{one:.1e} {two:.1e}")
            assert max(one, two) < 1e-6, (name, one, two)
