"""The estimates, scores and walks of ``measure.confidence``, on blocks whose law is known."""

from __future__ import annotations

import pytest
import torch

from measure.confidence import compare, held_out
from measure.confidence_blocks import TEMPERATURES, Blocks, answers, blocks, encode
from measure.confidence_scores import Cutter, Load, Route, Walk, fit_of, logistic, product, walk, with_temperature
from sglang_dflash.bench.tasks import load
from sglang_dflash.bench.tasks.pair_tasks import QUESTIONS
from sglang_dflash.pairs import drafter_path, target_path
from sglang_dflash.train.hf import load_tokenizer
from sglang_dflash.train.reference_decoder import ReferenceDecoder

DRAFTS = 15


def drawn(n: int, slope: float = 1.0, intercept: float = 0.0, hot: int = 0) -> Blocks:
    """Blocks whose draft is right with probability sigmoid(slope * logit(p) + intercept), p its probability at the
    temperature of that number."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 + 1.5 * torch.randn(n, DRAFTS, generator=generator)
    p = torch.sigmoid(logits[..., None] / torch.tensor(TEMPERATURES))
    chance = torch.sigmoid(slope * p[..., hot].logit() + intercept)
    right = torch.rand(n, DRAFTS, generator=generator) < chance
    return Blocks(p, right, torch.ones(n, DRAFTS, dtype=torch.bool))


def block(right: list[int], known: int = DRAFTS) -> Blocks:
    hits = torch.tensor([right + [0] * (DRAFTS - len(right))]).bool()
    return Blocks(torch.full((1, DRAFTS, len(TEMPERATURES)), 0.5), hits, (torch.arange(DRAFTS) < known)[None])


def test_the_blocks_walk_as_the_reference_decoder_does() -> None:
    decoder = ReferenceDecoder.load(target_path("tiny-hybrid"), drafter_path("tiny-hybrid", "weak"))
    prompt = encode(load_tokenizer(target_path("tiny-hybrid")), load(QUESTIONS, 1)[0])
    (answer,) = answers(decoder.target, [prompt], temperature=0.0, new_tokens=24)
    decoded = decoder.decode(prompt, max_new_tokens=24)
    (found,) = blocks(decoder.target, [decoder.drafter], prompt, answer)
    accept_lens, at = (1 + found.survived.sum(1)).tolist(), 0
    walked = []
    while at < len(accept_lens):
        walked.append(accept_lens[at])
        at += walked[-1]
    assert decoded.tokens == answer
    assert walked[:-1] == decoded.accept_lengths[:-1]  # the text's end cuts the last block
    assert len(walked) == len(decoded.steps) < len(answer) - 1


def test_a_draft_is_at_risk_while_all_before_it_are_right_and_the_text_goes_on() -> None:
    assert block([1, 1, 0, 1]).at_risk.sum() == 3
    assert block([1, 1, 1, 1], known=2).at_risk.sum() == 2
    assert block([1, 1, 0, 1]).survived.sum() == 2


def test_the_logistic_finds_slope_and_intercept() -> None:
    fit, held = drawn(20_000, slope=0.5, intercept=-0.3), drawn(500)
    right = torch.sigmoid(0.5 * held.confidence[..., 0].double().logit() - 0.3)
    assert torch.allclose(logistic(fit)(held)[:, :3], right.cumprod(1)[:, :3], atol=0.02)


def test_the_logistic_goes_by_the_drafter_where_it_saw_little() -> None:
    unseen = block([0])
    fitted = logistic(Blocks.joined([unseen] * 2))(unseen)
    assert 0.2 < fitted[0, 0] < 0.4  # two misses are not a law
    later = fitted[0, 1:] / fitted[0, :-1]
    assert torch.allclose(later, torch.full_like(later, 0.5), atol=1e-6)


def test_the_temperature_is_the_one_that_the_drafts_follow() -> None:
    hot = TEMPERATURES.index(2.0)
    blocks = drawn(20_000, hot=hot)
    assert torch.equal(with_temperature(blocks)(blocks), blocks.confidence[..., hot].double().cumprod(1))


def test_the_calibration_error_of_the_right_law_is_small() -> None:
    blocks = drawn(5_000)
    assert fit_of(product(blocks), blocks).calibration_error < 0.01
    assert fit_of(product(blocks).sqrt(), blocks).calibration_error > 0.05


def test_only_known_positions_are_scored() -> None:
    blocks = block([1], known=2)
    assert fit_of(product(blocks), blocks).brier == pytest.approx((0.5**2 + 0.25**2) / 2)


def test_every_text_is_judged_by_the_half_that_it_is_not_in() -> None:
    texts = [block([1] * n) for n in range(4)]
    seen = held_out(lambda fit: lambda text: fit.right.sum() * torch.ones(()), texts)
    assert [int(each) for each in seen] == [1 + 3, 0 + 2, 1 + 3, 0 + 2]


def test_walk() -> None:
    assert walk([3, 1, 1, 2, 1], [16, 16, 16, 2, 1]) == Walk(tokens=5, steps=2, verified=18)
    assert walk([3, 1, 1, 2, 1], [2, 1, 1, 2, 1]) == Walk(tokens=5, steps=3, verified=5)


def test_a_cut_keeps_what_reaches_the_threshold() -> None:
    text = block([1, 1, 1])
    cutter = Cutter([text], [product(text)], width=8)
    assert cutter.route(0.0) == Route(8, [Walk(1, 1, 8)])
    assert cutter.route(0.25) == Route(8, [Walk(1, 1, 3)])


def test_time_of_a_walk() -> None:
    machine = Load(ratio=2.5)  # a position more takes 0.1, and drafting 16 a tenth of 2.5
    assert machine.rate(Route(16, [Walk(30, 10, 160)])) == pytest.approx(30 / (10 * 2.5 + 10 * 0.25))
    assert machine.rate(Route(16, [Walk(30, 10, 10)])) == pytest.approx(30 / (10 * 1.0 + 10 * 0.25))
    assert machine.rate(Route(1, [Walk(30, 30, 30)])) == pytest.approx(1)


def test_the_rule_is_at_most_as_good_as_hindsight_and_better_than_no_cut() -> None:
    texts, machine = [drawn(2_000)], Load(4.0)
    cutter = Cutter(texts, [product(text) for text in texts], width=16)
    whole, ruled, swept = map(machine.rate, (cutter.route(0.0), cutter.by_rule(machine), cutter.swept(machine)))
    assert whole < 0.9 * ruled
    assert 0.97 * swept < ruled <= swept * 1.01


def test_compare_has_an_error_that_shrinks_with_the_texts() -> None:
    def routes(n: int) -> tuple[Route, Route]:
        return Route(16, [Walk(10 + i % 3, 5, 20) for i in range(n)]), Route(16, [Walk(10, 5, 20)] * n)

    gain, error = compare(Load(2.0), *routes(30))
    assert gain == pytest.approx(0.1) and error < 0.03 and error < compare(Load(2.0), *routes(6))[1]
