"""The drafter module: who sees whom, and that training computes what decoding computes."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.pairs import NAMES, drafter_kinds
from tests.support.reference_decoder import DrafterRun, TargetRun
from tools.train.blocks import BLOCK_SIZE, Blocks, block_masks, cut_blocks
from tools.train.drafter import FULL, SLIDING, Drafter, DrafterConfig, context_features, visible
from tools.train.hf import transformers

PUBLISHED_KEYS = {
    "architectures", "attention_bias", "attention_dropout", "block_size", "bos_token_id", "dflash_config", "dtype",
    "eos_token_id", "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "num_target_layers", "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window",
    "tie_word_embeddings", "torch_dtype", "use_cache", "use_sliding_window", "vocab_size",
}  # fmt: skip
SHIPPED = [(name, kind) for name in NAMES for kind in drafter_kinds(name)]


@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
@pytest.mark.parametrize("draft_window", [None, 1, 5])
def test_visibility_position_by_position(layer_type: str, draft_window: int | None) -> None:
    start, length, window = 9, 16, 4
    query, key = torch.arange(start, length)[:, None], torch.arange(length)
    seen = visible(layer_type, query, key, torch.tensor(start), window, draft_window)
    for i in range(start, length):
        for j in range(length):
            if layer_type == SLIDING:
                expected = i - window < j <= i
            else:
                expected = j >= start or draft_window is None or start - j <= draft_window
            assert seen[i - start, j].item() == expected, (i, j)


def tiny_config(layer_types: tuple[str, ...]) -> DrafterConfig:
    return DrafterConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        layer_types=layer_types, sliding_window=6, block_size=BLOCK_SIZE, mask_token_id=3, target_layer_ids=(0, 1),
        num_target_layers=3, max_position_embeddings=128, rope_theta=1e4, rms_norm_eps=1e-6, eos_token_id=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def random_target() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).float().eval()


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)])
@pytest.mark.parametrize("width", [2, 5, 16])
@torch.no_grad()
def test_packed_training_drafts_what_decoding_drafts(
    random_target: transformers.PreTrainedModel, layer_types: tuple[str, ...], width: int
) -> None:
    """Many blocks in one row with masks, or one block after its cached context: the same hidden states."""
    torch.manual_seed(1)
    config = tiny_config(layer_types)
    drafter = Drafter(config).eval()
    ids = torch.randint(4, 64, (1, 40))
    anchors = torch.tensor([[7, 20, 31]])
    blocks = Blocks(anchors, ids[:, :1].expand(1, 3)[:, :, None], torch.empty(0), torch.full((1, 3), width))
    tokens = torch.full((1, 3, BLOCK_SIZE), config.mask_token_id)
    tokens[:, :, 0] = ids[0, anchors]
    states = random_target.model(input_ids=ids, output_hidden_states=True).hidden_states
    context = drafter.context_key_values(context_features(states, config.target_layer_ids), torch.arange(40)[None])
    positions = (anchors[:, :, None] + torch.arange(BLOCK_SIZE)).flatten(1)
    embeddings = random_target.model.embed_tokens(tokens.flatten(1))
    packed = drafter(embeddings, positions, context, block_masks(config, blocks, 40)).view(3, BLOCK_SIZE, -1)

    for hidden, anchor in zip(packed, anchors[0].tolist(), strict=True):
        target, run = TargetRun(random_target), DrafterRun(drafter, random_target, None)
        run.inject(target.append(ids[0, :anchor].tolist())[1], anchor)
        alone = run.block_hidden(int(ids[0, anchor]), width)
        torch.testing.assert_close(alone, hidden[:width], atol=1e-5, rtol=1e-5)


def test_blocks_start_in_answers_and_teach_nothing_past_their_end() -> None:
    ids = torch.arange(60).view(2, 30)
    weights = torch.zeros(2, 30)
    weights[:, 10:22] = 1.0
    blocks = cut_blocks(ids, weights, 8, torch.Generator().manual_seed(0))
    offsets = blocks.anchors[:, :, None] + torch.arange(BLOCK_SIZE)
    assert ((blocks.anchors >= 10) & (blocks.anchors < 21)).all()
    assert (offsets[blocks.learnable] < 22).all()
    assert not blocks.learnable[:, :, 0].any()
    inside = (torch.arange(BLOCK_SIZE) >= 1) & (torch.arange(BLOCK_SIZE) < blocks.widths[:, :, None]) & (offsets < 22)
    assert torch.equal(blocks.learnable, inside)
    rows = torch.arange(2)[:, None, None]
    assert torch.equal(blocks.tokens[inside], ids[rows, offsets.clamp(max=29)][inside])
