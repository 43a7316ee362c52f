"""Counting sampled tokens against the target's probabilities in transformers.

A token x drawn from the law p falls, when p's tokens are laid side by side by falling probability, into an interval of
length p(x); a uniform point of that interval is uniform on [0, 1) exactly if x follows p, whatever the context
(Rosenblatt 1952). So every generated token is a draw to count, in bins of one token and of two successive ones. This
stays true of any selection that looks at nothing but the tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.ops import token_hash
from tests.support.generation import Params, answers, tokens
from tests.support.probability import p_value
from tests.support.servers import Server

TEXTS_PER_REQUEST = 256  # a request with thousands outlasts any sensible timeout on a slow machine


def sample(
    server: Server,
    target: Any,
    prompts: Sequence[list[int]],
    params: Params,
    *,
    texts: int,
    length: int,
    seeded: bool,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """``texts`` texts of ``length`` tokens after each of the prompts.

    Args:
        target: the target in transformers.
        params: of SGLang's ``sampling_params``.
        seeded: each text has a seed of its own, its index; otherwise none has.
        generator: of the points inside their intervals.

    Returns:
        Points [texts, length], uniform if the text follows the target's law, NaN off the law's support; and delays
        [texts, length], how much later than the winner (1.0: not at all) the emitted token came in the race that its
        seed decides, empty without seeds.
    """
    common = {**params, "max_new_tokens": length, "ignore_eos": True}
    seeds = torch.arange(len(prompts) * texts)
    each = [{**common, "sampling_seed": seed} if seeded else common for seed in seeds.tolist()]
    inputs = [prompt for prompt in prompts for _ in range(texts)]
    pieces = [slice(i, i + TEXTS_PER_REQUEST) for i in range(0, len(inputs), TEXTS_PER_REQUEST)]
    found = [answer for piece in pieces for answer in answers(server, inputs[piece], each[piece])]
    generated = torch.tensor(tokens(found))
    points, delays = [], []
    for prompt, new, own in zip(prompts, generated.split(texts), seeds.split(texts), strict=True):
        ids = torch.cat((torch.tensor(prompt).expand(texts, -1), new), dim=1)
        with torch.inference_mode():
            logits = target(ids).logits[:, len(prompt) - 1 : -1].float()
        probs = law(logits, new, params)
        points.append(uniform_points(probs, new, generator))
        if seeded:
            delays.append(race_delays(probs, new, own, len(prompt) - 1))
    return torch.cat(points), torch.cat(delays) if seeded else torch.empty(0)


def uniform_points(probs: Tensor, texts: Tensor, generator: torch.Generator) -> Tensor:
    rank_of = probs.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    own = texts[..., None]
    own_prob = probs.gather(2, own)[..., 0]
    above = probs.where(rank_of < rank_of.gather(2, own), 0.0).sum(dim=-1)
    inside = own_prob * torch.rand(texts.shape, generator=generator, dtype=torch.float64)
    return (above + inside).where(own_prob > 0, torch.nan)


def race_delays(probs: Tensor, texts: Tensor, seeds: Tensor, first_position: int) -> Tensor:
    """Plain decoding's draw, redone: the token of least -log(u) / p wins (:func:`sglang_dflash.ops.seeded_draw`)."""
    (number, length), vocab = texts.shape, probs.shape[-1]
    positions = (first_position + torch.arange(length)).repeat(number)
    uniform = (token_hash(seeds.repeat_interleave(length), positions, torch.arange(vocab)).double() + 0.5) * 2.0**-32
    times = -uniform.log() / probs.view(-1, vocab)
    return (times.gather(1, texts.view(-1, 1))[:, 0] / times.min(dim=1).values).view_as(texts)


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


def assert_seeds_decided(delays: Tensor) -> None:
    """Not only the law: each token is the very one that plain decoding draws with its seed.

    Save where two tokens arrive at the same moment within the rounding of the logits, or one is on a filter's edge, and
    never arrives.
    """
    late = delays[delays > 1.001]
    assert late.isinf().all(), late
    assert len(late) < 1e-3 * delays.numel(), late
