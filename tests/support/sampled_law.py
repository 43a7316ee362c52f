"""Counting sampled tokens against the target's probabilities in transformers.

A token x drawn from the law p falls, when p's tokens are laid side by side by falling probability, into an interval of
length p(x); a uniform point of that interval is uniform on [0, 1) exactly if x follows p, whatever the context
(Rosenblatt 1952). So every generated token is a draw to count, in bins of one token and of two successive ones. This
stays true of any selection that looks at nothing but the tokens before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.ops import token_hash
from tests.support.generation import Params, answers, tokens
from tests.support.probability import p_value
from tests.support.servers import Server

TEXTS_PER_REQUEST = 256  # a request with thousands outlasts any sensible timeout on a slow machine


@dataclass(frozen=True)
class Sample:
    """What a setting generated; every tensor is [texts, length].

    Attributes:
        points: uniform if the text follows the target's law; NaN off the law's support.
        tops: the law's largest probability, before the token was drawn.
        delays: how much later than the winner (1.0: not at all) the emitted token came in the race that its seed
            decides; empty without seeds.
        draft_probs: the law's probability of the draft that was judged there; NaN where none was or none was recorded.
        kept: whether that draft is the token.
    """

    points: Tensor
    tops: Tensor
    delays: Tensor
    draft_probs: Tensor
    kept: Tensor


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
    probe: Path | None = None,
) -> Sample:
    """``texts`` texts of ``length`` tokens after each of the prompts.

    Args:
        target: the target in transformers.
        params: of SGLang's ``sampling_params``.
        seeded: each text has a seed of its own, its index; otherwise none has.
        generator: of the points inside their intervals.
        probe: the folder in which the server records its drafts (``tests/plugin``).
    """
    common = {**params, "max_new_tokens": length, "ignore_eos": True}
    seeds = torch.arange(len(prompts) * texts)
    each = [{**common, "sampling_seed": seed} if seeded else common for seed in seeds.tolist()]
    inputs = [prompt for prompt in prompts for _ in range(texts)]
    pieces = [slice(i, i + TEXTS_PER_REQUEST) for i in range(0, len(inputs), TEXTS_PER_REQUEST)]
    found = [answer for piece in pieces for answer in answers(server, inputs[piece], each[piece])]
    generated = torch.tensor(tokens(found))
    drafts = judged_drafts(probe, found, inputs) if probe else torch.full_like(generated, -1)
    points, tops, delays, draft_probs = [], [], [], []
    parts = (part.split(texts) for part in (generated, drafts, seeds))
    for prompt, new, drafted, own in zip(prompts, *parts, strict=True):
        ids = torch.cat((torch.tensor(prompt).expand(texts, -1), new), dim=1)
        with torch.inference_mode():
            logits = target(ids).logits[:, len(prompt) - 1 : -1].float()
        probs = law(logits, new, params)
        points.append(uniform_points(probs, new, generator))
        tops.append(probs.amax(dim=-1))
        of_draft = probs.gather(2, drafted.clamp(min=0)[..., None])[..., 0]
        draft_probs.append(of_draft.where(drafted >= 0, torch.nan))
        if seeded:
            delays.append(race_delays(probs, new, own, len(prompt) - 1))
    late = torch.cat(delays) if seeded else torch.empty(0)
    return Sample(torch.cat(points), torch.cat(tops), late, torch.cat(draft_probs), generated == drafts)


def judged_drafts(probe: Path, found: Sequence[dict[str, Any]], inputs: Sequence[list[int]]) -> Tensor:
    """int64 [texts, length]: the draft that the acceptance rule judged at each token, -1 where it judged none."""
    texts = tokens(found)
    drafts = torch.full((len(texts), len(texts[0])), -1)
    row_of = {answer["meta_info"]["id"]: row for row, answer in enumerate(found)}
    for line in map(json.loads, (probe / "drafts.jsonl").read_text().splitlines()):
        row = row_of.get(line["rid"])
        if row is None:
            continue
        first = line["position"] + 1 - len(inputs[row])
        for i, draft in enumerate(line["block"][1:], start=first):
            if i >= drafts.shape[1]:
                break
            drafts[row, i] = draft
            if texts[row][i] != draft:  # those after a rejected draft are not judged
                break
    return drafts


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


def p_of_kept_drafts(found: Sample) -> float:
    """Whether drafts are kept as often as the law wants: the normal deviate of their number, two-sided.

    Given the tokens before it a draft is kept with its probability under the law, so the sum of the differences is a
    martingale with variance p (1 - p) a draft. It looks where a wrong rule shows; counting all tokens dilutes that.
    """
    probs = found.draft_probs.double()
    judged = ~probs.isnan()
    probs, kept = probs[judged], found.kept[judged].double()
    variance = (probs * (1 - probs)).sum()
    assert variance > 50, f"{len(probs)} drafts in too little doubt"
    return math.erfc(float((kept - probs).sum().abs() / (2 * variance).sqrt()))


def assert_seeds_decided(delays: Tensor) -> None:
    """Not only the law: each token is the very one that plain decoding draws with its seed.

    Save where two tokens arrive at the same moment within the rounding of the logits, or one is on a filter's edge, and
    never arrives.
    """
    late = delays[delays > 1.001]
    assert late.isinf().all(), late
    assert len(late) < 1e-3 * delays.numel(), late
