"""The recipe of the tiny DFlash2 drafter: what it starts from, which optimizer trains what, and the selector's loss."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.drafter import Drafter, DrafterConfig
from sglang_dflash_lab.train.drafter_training import RECIPES, drafter_config
from sglang_dflash_lab.train.hf import load_model


@pytest.fixture
def drafter() -> Drafter:
    torch.manual_seed(0)
    return Drafter(drafter_config(RECIPES["dflash2"], load_model(target_path("tiny-hybrid")), 3))


def test_the_shipped_drafter_has_the_recipes_configuration(drafter: Drafter) -> None:
    assert drafter.config == DrafterConfig.load(drafter_path("tiny-hybrid", "dflash2"))


def test_training_starts_from_the_plain_drafts_and_a_missing_label_is_a_candidate(drafter: Drafter) -> None:
    selector, width = drafter.candidate_selector, 16
    assert selector is not None
    layer = drafter.layers[0]
    x = torch.randn(2, 3 * width, drafter.config.hidden_size)
    assert torch.equal(layer.mlp_conv(x, width, lambda y: y), x)
    hidden, logits, before = x[:, :5], torch.randn(2, 5, 1024), torch.tensor([[1, 2, 3, 4, 5]] * 2)
    assert torch.equal(selector.walk(before[:, 0], hidden, logits)[0], logits.argmax(-1))
    worst = logits.flatten(0, 1).argmin(-1)
    losses = selector.losses(hidden.flatten(0, 1), logits.flatten(0, 1), before.flatten(), worst)
    assert (losses > math.log(selector.top_k)).all() and losses.isfinite().all()
    losses.sum().backward()
    gradient = selector.successor_codebook.grad
    assert gradient is not None and gradient[worst].abs().sum(-1).all()
