"""The cards' cells: what is read out of published figures, and what the policy makes of them."""

from __future__ import annotations

import pytest

from sglang_dflash.bench.simulate.cards import CardCell, card_table, cells, choose, survival, without_figures
from sglang_dflash.errors import DFlashError


def cell(plain: float, eight: float, sixteen: float) -> CardCell:
    return CardCell("a card", "math", 4, {1: plain, 8: eight, 16: sixteen}, {1: 1.0, 8: 5.0, 16: 6.0})


@pytest.mark.parametrize("card", list(cells()), ids=lambda c: f"{c.card}-{c.task}-{c.concurrency}")
def test_survival_and_cost_give_the_published_figures_back(card: CardCell):
    curve = survival(card.accept)
    assert len(curve) == max(card.accept) - 1
    assert curve == sorted(curve, reverse=True)
    for width, speed in card.speed.items():
        tokens = 1 + sum(curve[: width - 1])
        assert tokens == pytest.approx(card.accept[width])
        assert 1000 * card.concurrency * tokens / card.milliseconds(width) == pytest.approx(speed)


def test_survival_between_published_blocks_falls_by_one_ratio():
    """0.75 up to the first block, 0.5 from there on."""
    curve = survival({1: 1.0, 3: 2.3125, 5: 2.734375})
    assert curve == pytest.approx([0.75, 0.5625, 0.28125, 0.140625])


def test_impossible_accept_lengths_are_refused():
    with pytest.raises(DFlashError, match="accept lengths 5.0 at width 8 and 4.0 at width 16"):
        survival({1: 1.0, 8: 5.0, 16: 4.0})


def test_costs_are_linear_between_published_widths():
    made = cell(plain=400, eight=1000, sixteen=1000)
    assert made.milliseconds(1) == 10
    assert made.milliseconds(8) == 20
    assert made.milliseconds(16) == 24
    assert made.milliseconds(12) == 22


@pytest.mark.parametrize(
    ("speeds", "width"), [((400, 1000, 1300), 16), ((400, 1000, 700), 8), ((400, 200, 100), 1), ((400, 470, 150), 4)]
)
def test_the_policy_takes_the_fastest_width(speeds: tuple[float, float, float], width: int):
    chosen = choose(cell(*speeds))
    assert chosen.width == width
    assert chosen.tokens_per_s > 0.97 * max(speeds)


def test_the_table_has_every_cell_and_names_the_cards_without_any():
    chosen = [choose(cell(400, 1000, 700)), choose(cell(400, 470, 150))]
    table = card_table(chosen)
    first, second, means = table.rows
    assert first[3] == "8"
    assert second[3].endswith("~")
    assert means[0] == "geometric mean"
    assert set(without_figures()) == {"Qwen3.6-27B", "Qwen3-Coder-Next"}
    assert all(name in table.caption for name in without_figures())
