"""The acceptance rule on a toy target: emitted text has the target's law for any drafter.

The target is a Markov chain over 5 tokens, the drafter a fixed successor per token, so the law of the first
tokens can be written down. Each test speculates 40,000 texts and compares the counts of their first three
tokens with that law.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sglang_dflash.ops import Accepted, accept_block, seeded_draw
from tests.support.probability import p_value

VOCAB, TEXTS, LENGTH, START = 5, 40_000, 3, 0
SUCCESSOR = torch.tensor([1, 1, 3, 0, 2])
TARGET = torch.tensor(
    [
        [0.10, 0.60, 0.10, 0.10, 0.10],
        [0.30, 0.30, 0.20, 0.00, 0.20],
        [0.05, 0.15, 0.20, 0.25, 0.35],
        [0.90, 0.02, 0.03, 0.05, 0.00],
        [0.20, 0.20, 0.00, 0.30, 0.30],
    ]
)

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Accepted]


def our_rule(draft: Tensor, probs: Tensor, lens: Tensor, seeds: Tensor) -> Accepted:
    positions = (lens[:, None] + torch.arange(draft.shape[1])).flatten()
    tokens = seeded_draw(probs.flatten(0, 1), seeds.repeat_interleave(draft.shape[1]), positions)
    return accept_block(draft, tokens.view_as(draft), lens)


def rejection_rule(
    draft: Tensor, probs: Tensor, lens: Tensor, seeds: Tensor, *, exclude_draft: bool = True
) -> Accepted:
    """Leviathan et al. (2023): keep draft x with probability p(x), else draw one of the others.

    ``exclude_draft=False`` is the common mistake: the replacement comes from p itself, so drafts are too
    frequent.
    """
    target = torch.multinomial(probs.flatten(0, 1), 1).view_as(draft)
    proposed = draft[:, 1:, None]
    keep = torch.rand(proposed.shape[:2]) < probs[:, :-1].gather(2, proposed).squeeze(2)
    rest = probs[:, :-1].scatter(2, proposed, 0.0) if exclude_draft else probs[:, :-1]
    # A kept draft is never replaced; give its row some mass where the draft is certain and nothing remains.
    rest = torch.where(keep[..., None], probs[:, :-1], rest)
    replacement = torch.multinomial(rest.flatten(0, 1), 1).view_as(keep)
    accepted = keep.int().cumprod(dim=1).sum(dim=1)
    bonus = torch.where(
        accepted < keep.shape[1],
        torch.cat((replacement, target[:, -1:]), dim=1).gather(1, accepted[:, None]).squeeze(1),
        target[:, -1],
    )
    out = torch.cat((draft[:, 1:], bonus[:, None]), dim=1).scatter(1, accepted[:, None], bonus[:, None])
    return Accepted(out, (accepted + 1).int()[None], accepted.int()[None], bonus, lens + accepted + 1)


def wrong_rule(draft: Tensor, probs: Tensor, lens: Tensor, seeds: Tensor) -> Accepted:
    return rejection_rule(draft, probs, lens, seeds, exclude_draft=False)


def speculate(rule: Rule, width: int, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Texts [TEXTS, LENGTH] and the first step's accept lengths [TEXTS]."""
    text = torch.full((TEXTS, LENGTH + width), START)
    lens, anchor, first = torch.zeros(TEXTS, dtype=torch.int64), torch.full((TEXTS,), START), None
    while int(lens.min()) < LENGTH:
        draft = [anchor]
        while len(draft) < width:
            draft.append(SUCCESSOR[draft[-1]])
        block = torch.stack(draft, dim=1)
        step = rule(block, TARGET[block], lens, seeds)
        fresh = torch.arange(width) < step.accept_lens[:, None]
        running = lens < LENGTH
        columns = (lens[:, None] + torch.arange(width)).clamp(max=text.shape[1] - 1)
        text.scatter_(1, columns, torch.where(fresh & running[:, None], step.out_tokens, text.gather(1, columns)))
        first = step.accept_lens if first is None else first
        anchor = torch.where(running, step.bonus, anchor)
        lens = torch.where(running, step.new_seq_lens, lens)
    assert first is not None
    return text[:, :LENGTH], first


def law() -> Tensor:
    """Probability of each text, [VOCAB] * LENGTH."""
    return torch.einsum("a,ab,bc->abc", TARGET[START], TARGET, TARGET)


def p_of(text: Tensor) -> float:
    codes = (text * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    return p_value(torch.bincount(codes, minlength=VOCAB**LENGTH), law())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("rule", "width"), [*((our_rule, width) for width in (1, 2, 3, 8)), (rejection_rule, 3)])
def test_a_right_rule_has_the_targets_law(rule: Rule, width: int) -> None:
    text, _ = speculate(rule, width, torch.arange(TEXTS))
    assert p_of(text) > 0.01


def test_a_wrong_rule_is_noticed() -> None:
    text, _ = speculate(wrong_rule, 3, torch.arange(TEXTS))
    assert p_of(text) < 1e-9


def test_our_rule_accepts_as_often_as_rejection_sampling() -> None:
    certain = [TARGET[START, 1], TARGET[1, 1]]  # drafts from START are 1, 1
    expected = torch.stack([1 - certain[0], certain[0] * (1 - certain[1]), certain[0] * certain[1]])
    for rule in (our_rule, rejection_rule):
        _, first = speculate(rule, 3, torch.arange(TEXTS))
        assert p_value(torch.bincount(first - 1, minlength=3), expected) > 0.01


def test_same_seed_gives_the_same_text_for_every_width() -> None:
    plain, _ = speculate(our_rule, 1, torch.arange(TEXTS))
    for width in (2, 3, 8):
        assert torch.equal(speculate(our_rule, width, torch.arange(TEXTS))[0], plain)
