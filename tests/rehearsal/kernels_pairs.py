"""The published pairs as one tensor-parallel rank sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dflash.drafter.config import DrafterConfig, load_config, text_config
from tests.support.cards import FOLDER, NAMES

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class RankShapes:
    """One rank's share of a pair.

    Attributes:
        drafter: the whole drafter.
        draft_heads, draft_kv_heads: of the drafter on this rank.
        target: the whole target's configuration, its published keys as attributes.
        heads, kv_heads: of the target's full attention on this rank.
        key_heads, value_heads: of its gated delta net on this rank.
        vocab: logits of a position; every rank sees all of them, without a gap (both vocabularies fill the rows that
            SGLang pads to).
    """

    pair: str
    tp: int
    drafter: DrafterConfig
    draft_heads: int
    draft_kv_heads: int
    target: Any
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.pair} TP {self.tp}"


def rank_shapes(tp_sizes: tuple[int, ...] = TP_SIZES) -> list[RankShapes]:
    """Every published pair at every size."""
    return [_of_rank(pair, tp) for pair in NAMES for tp in tp_sizes]


def _of_rank(pair: str, tp: int) -> RankShapes:
    drafter = DrafterConfig.load(FOLDER / pair / "drafter")
    target = text_config(load_config(FOLDER / pair / "target"))

    def divided(heads: int) -> int:
        assert heads % tp == 0, f"{pair}: {heads} heads cannot be divided by TP {tp}"
        return heads // tp

    def divided_or_replicated(kv_heads: int) -> int:
        return divided(kv_heads) if kv_heads > tp else 1

    return RankShapes(
        pair=pair,
        tp=tp,
        drafter=drafter,
        draft_heads=divided(drafter.num_heads),
        draft_kv_heads=divided_or_replicated(drafter.num_kv_heads),
        target=target,
        heads=divided(target["num_attention_heads"]),
        kv_heads=divided_or_replicated(target["num_key_value_heads"]),
        key_heads=divided(target["linear_num_key_heads"]),
        value_heads=divided(target["linear_num_value_heads"]),
        vocab=target["vocab_size"],
    )
