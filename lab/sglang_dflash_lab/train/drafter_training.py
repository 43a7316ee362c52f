"""Train a drafter against a frozen target, on the target's own output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash_lab.train.drafter import FULL, SLIDING, Drafter, DrafterConfig, context_features, visible
from sglang_dflash_lab.train.generate import corpus_prompts, target_output
from sglang_dflash_lab.train.hf import load_model, load_tokenizer, transformers
from sglang_dflash_lab.train.loop import train, write_provenance
from sglang_dflash_lab.train.rows import Weighted, packed_rows
from sglang_dflash_lab.train.target_training import autocast

BLOCK_SIZE = 16
# A hidden tail makes one drafter usable at each width.
VISIBLE_BLOCK_SIZES = torch.tensor([16, 16, 16, 8, 4])


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows: anchors and widths [rows, n], tokens and learnable [rows, n, BLOCK_SIZE]."""

    anchors: Tensor
    tokens: Tensor
    learnable: Tensor
    widths: Tensor


def cut_blocks(ids: Tensor, weights: Tensor, n: int, generator: torch.Generator, width: int | None = None) -> Blocks:
    """Draw ``n`` anchors per row inside the answers; tokens after an answer's end are not learnable.

    Args:
        ids: int64 [rows, length].
        weights: float32 [rows, length], 1.0 on answers.
        width: of all blocks; None draws each from ``VISIBLE_BLOCK_SIZES``.
    """
    answer = (weights == 1.0).float()
    can_start = answer[:, :-1] * answer[:, 1:]
    anchors = torch.multinomial(can_start + 1e-9, n, generator=generator)
    rows = torch.arange(len(ids))[:, None]
    tokens, in_answer = (F.pad(x, (0, BLOCK_SIZE - 1)).unfold(1, BLOCK_SIZE, 1)[rows, anchors] for x in (ids, answer))
    widths = VISIBLE_BLOCK_SIZES[torch.randint(len(VISIBLE_BLOCK_SIZES), anchors.shape, generator=generator)]
    widths = widths if width is None else torch.full_like(widths, width)
    learnable = in_answer.cumprod(-1).bool() & (torch.arange(BLOCK_SIZE) < widths[:, :, None])
    learnable[:, :, 0] = False
    return Blocks(anchors, tokens, learnable, widths)


def block_masks(config: DrafterConfig, blocks: Blocks, length: int) -> list[Tensor]:
    """Return per layer a bool mask [rows, 1, n * B, length + n * B]: a block reads its context and itself."""
    rows, n = blocks.anchors.shape
    offsets, context = torch.arange(BLOCK_SIZE), torch.arange(length)
    start = blocks.anchors[:, :, None, None]  # [rows, n, 1, 1], as below
    query = start + offsets[:, None]
    own = blocks.anchors[:, :, None] + offsets
    key = torch.cat((context.expand(rows, length), own.flatten(1)), dim=1)[:, None, None]
    same_block = torch.eye(n, dtype=torch.bool)[:, :, None] & (offsets < blocks.widths[:, :, None, None])
    allowed = torch.cat((context < start, same_block.flatten(2)[:, :, None]), dim=-1)
    return [
        (visible(layer_type, query, key, start, config.sliding_window) & allowed).flatten(1, 2)[:, None]
        for layer_type in config.layer_types
    ]


ANCHORS_PER_ROW = {256: 24, 2048: 96}
ROWS = {256: 12, 2048: 2}
LONG_SHARE = 0.2  # rows of 2048 tokens, for late positions
# Later positions are reached less often.
LOSS_DECAY = 7.0


@dataclass(frozen=True)
class DrafterRecipe:
    """Parameters of a kind of drafter.

    Attributes:
        start_from: the kind whose weights it starts from.
        of_stage: train for the target of this stage instead of the last.
    """

    layer_types: tuple[str, ...]
    steps: int
    sliding_window: int | None = None
    start_from: str | None = None
    of_stage: int | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0


RECIPES = {
    "good": DrafterRecipe((FULL, FULL), 600),
    "weak": DrafterRecipe((FULL,), 220),
    "swa": DrafterRecipe((SLIDING, SLIDING), 600, sliding_window=128, start_from="good"),
    "interleaved": DrafterRecipe((SLIDING, SLIDING, FULL), 600, sliding_window=128, start_from="good"),
    "mismatched": DrafterRecipe((FULL, FULL), 700, of_stage=1),
    "dflash2": DrafterRecipe(
        (FULL, FULL), 400, conv_kernel_size=2, conv_group_size=16, selector_rank=32, selector_top_k=8
    ),
}


def drafter_config(recipe: DrafterRecipe, target: transformers.PreTrainedModel, mask_token_id: int) -> DrafterConfig:
    """Return a drafter for ``target`` that reads an early layer, a middle one and the last but one."""
    t = target.config
    layers = t.num_hidden_layers
    return DrafterConfig(
        vocab_size=t.vocab_size,
        hidden_size=t.hidden_size,
        intermediate_size=3 * t.hidden_size,
        num_attention_heads=t.num_attention_heads,
        num_key_value_heads=t.num_key_value_heads,
        head_dim=t.head_dim,
        layer_types=recipe.layer_types,
        sliding_window=recipe.sliding_window,
        block_size=BLOCK_SIZE,
        mask_token_id=mask_token_id,
        target_layer_ids=(1, layers // 2, layers - 2),
        num_target_layers=layers,
        max_position_embeddings=t.max_position_embeddings,
        rope_theta=t.rope_parameters["rope_theta"],
        rms_norm_eps=t.rms_norm_eps,
        eos_token_id=t.eos_token_id,
        conv_kernel_size=recipe.conv_kernel_size,
        conv_group_size=recipe.conv_group_size,
        selector_rank=recipe.selector_rank,
        selector_top_k=recipe.selector_top_k,
    )


def train_drafter(
    kind: str,
    target_folder: Path,
    out: Path,
    work: Path,
    seed: int,
    device: str,
    steps: int | None = None,
    start: Path | None = None,
    *,
    sampled: bool = False,
) -> None:
    """Train one kind of drafter (of ``RECIPES``) for the target in ``target_folder``.

    The log's validation figure is the teacher-forced accept length at block size 16 on kept answers.

    Args:
        work: checkpoints and the target's answers, for resuming.
        steps: replaces the recipe's number.
        start: a drafter of the same widths to start from; layers it lacks are initialised.
        sampled: train on text that the target samples at temperature 1; otherwise on its greedy text.
    """
    recipe = RECIPES[kind] if steps is None else replace(RECIPES[kind], steps=steps)
    data_file = work / "target-output.pt"
    if not data_file.exists():
        work.mkdir(parents=True, exist_ok=True)
        torch.save(target_output(target_folder, corpus_prompts(seed), device, sampled=sampled), data_file)
    data: list[Weighted] = torch.load(data_file, weights_only=True)
    torch.manual_seed(seed)
    tokenizer, target = load_tokenizer(target_folder), load_model(target_folder, device=device)
    target.requires_grad_(False)
    config = drafter_config(recipe, target, tokenizer.mask_token_id)
    drafter = Drafter(config)
    if start is not None:
        drafter.load_state_dict(Drafter.load(start).state_dict(), strict=False)
    drafter = drafter.to(device)
    n_kept = min(150, len(data) // 10)

    def rows_of(items: list[Weighted], length: int, rng: Random) -> tuple[Tensor, Tensor]:
        pad = int(tokenizer.pad_token_id)
        return packed_rows(lambda: items[rng.randrange(len(items))], ROWS[length], length, pad, spare=2)

    def loss_of_step(i: int) -> Tensor:
        rng = Random(f"drafter-rows/{seed}/{i}")
        length = 2048 if rng.random() < LONG_SHARE else 256
        ids, weights = rows_of(data[n_kept:], length, rng)
        blocks = cut_blocks(ids, weights, ANCHORS_PER_ROW[length], torch.Generator().manual_seed(seed * 10**6 + i))
        return block_loss(drafter, *block_outputs(drafter, target, ids, blocks), blocks)

    kept_ids, kept_weights = rows_of(data[:n_kept], 256, Random(0))
    kept_blocks = cut_blocks(kept_ids, kept_weights, 24, torch.Generator().manual_seed(0), width=BLOCK_SIZE)

    @torch.no_grad()
    def accept_length() -> float:
        parts = block_outputs(drafter, target, kept_ids, kept_blocks)
        hidden, logits = (part.unflatten(1, (-1, BLOCK_SIZE)).flatten(0, 1)[:, 1:] for part in parts)
        tokens = kept_blocks.tokens.flatten(0, 1).to(device)
        drafted, _ = drafter.choose(tokens[:, 0], hidden, logits)
        agrees = (drafted == tokens[:, 1:]) & kept_blocks.learnable.flatten(0, 1)[:, 1:].to(device)
        return 1 + agrees.int().cumprod(-1).sum(-1).float().mean().item()

    log = train(drafter, loss_of_step, accept_length, recipe.steps, work / f"drafter-{kind}")
    drafter.save(out)
    write_provenance(out, seed, log, "validation accept length", asdict(recipe) | {"started": start is not None})


def block_loss(drafter: Drafter, hidden: Tensor, logits: Tensor, blocks: Blocks) -> Tensor:
    device = hidden.device
    chosen = blocks.learnable.flatten(1).to(device)
    hidden, logits = hidden[chosen].float(), logits[chosen].float()
    labels = blocks.tokens.flatten(1).to(device)[chosen]
    losses = F.cross_entropy(logits, labels, reduction="none")
    if drafter.candidate_selector is not None:
        before = blocks.tokens.roll(1, dims=-1).flatten(1).to(device)[chosen]
        losses = losses + drafter.candidate_selector.losses(hidden, logits, before, labels)
    position_weight = torch.exp(-(torch.arange(BLOCK_SIZE) - 1) / LOSS_DECAY).to(device)
    weight = position_weight.expand(blocks.tokens.shape).flatten(1)[chosen]
    return (losses * weight).sum() / weight.sum()


def block_outputs(
    drafter: Drafter,
    target: transformers.PreTrainedModel,
    ids: Tensor,
    blocks: Blocks,
    features: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the drafter's hidden states and logits [rows, n * B, ...] of blocks of ``ids`` [rows, length].

    ``features`` are those of :func:`context_features`; None computes them.
    """
    (rows, length), config, device = ids.shape, drafter.config, target.device
    tokens = torch.full_like(blocks.tokens, config.mask_token_id)
    tokens[:, :, 0] = blocks.tokens[:, :, 0]
    positions = (blocks.anchors[:, :, None] + torch.arange(BLOCK_SIZE)).flatten(1).to(device)
    masks = [mask.to(device) for mask in block_masks(config, blocks, length)]
    with autocast(device):
        if features is None:
            with torch.no_grad():
                states = target.model(input_ids=ids.to(device), output_hidden_states=True, use_cache=False)
            features = context_features(states.hidden_states, config.target_layer_ids)
        context = drafter.context_key_values(features, torch.arange(length, device=device).expand(rows, length))
        embeddings = target.model.embed_tokens(tokens.flatten(1).to(device))
        hidden = drafter(embeddings, positions, context, masks, BLOCK_SIZE)
        return hidden, target.lm_head(hidden)
