"""Train a drafter against a frozen target, on the target's own greedy output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from sglang_dflash.train.drafter import FULL, SLIDING, Drafter, DrafterConfig, context_features, visible
from sglang_dflash.train.generate import greedy_answers
from sglang_dflash.train.hf import transformers
from sglang_dflash.train.loop import LogEntry, train
from sglang_dflash.train.rows import Weighted, pack, training_conversation
from sglang_dflash.train.target_training import autocast

BLOCK_SIZE = 16
ANCHORS_PER_ROW = {256: 24, 2048: 96}
ROWS = {256: 12, 2048: 2}
LONG_SHARE = 0.2  # of the steps: rows of 2048 tokens, for drafting at late positions
# Later positions of a block are reached less often, so they count less: exp(-(k - 1) / LOSS_DECAY) at k.
LOSS_DECAY = 7.0
VISIBLE_BLOCK_SIZES = (
    16,
    16,
    16,
    8,
    4,
)  # drawn per block; hiding the tail makes one drafter usable at each width
CONVERSATIONS = 4500


@dataclass(frozen=True)
class DrafterRecipe:
    """What distinguishes the kinds of drafter.

    Attributes:
        start_from: the kind whose weights it starts from.
        of_stage: trained for the target as it was after this stage of its training, instead of the last.
    """

    layer_types: tuple[str, ...]
    steps: int
    sliding_window: int | None = None
    start_from: str | None = None
    of_stage: int | None = None

    def with_steps(self, steps: int) -> DrafterRecipe:
        return replace(self, steps=steps)


RECIPES = {
    "good": DrafterRecipe((FULL, FULL), 600),
    "weak": DrafterRecipe((FULL,), 220),
    # The sliding ones start from the good one's weights: what a layer has to say changes little, whom it sees does.
    "swa": DrafterRecipe((SLIDING, SLIDING), 600, sliding_window=128, start_from="good"),
    "interleaved": DrafterRecipe((SLIDING, SLIDING, FULL), 600, sliding_window=128, start_from="good"),
    "mismatched": DrafterRecipe((FULL, FULL), 700, of_stage=1),
}


def drafter_config(recipe: DrafterRecipe, target: transformers.PreTrainedModel, mask_token_id: int) -> DrafterConfig:
    """A drafter for `target`; reads an early layer, a middle one and the deepest that can be captured."""
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
    )


Chat = list[dict[str, str]]


def corpus_prompts(seed: int, n: int = CONVERSATIONS) -> list[tuple[Chat, bool]]:
    """Chats of the train split, each with whether the target shall think before it answers."""
    rng = Random(f"drafter/{seed}")
    drawn = (training_conversation(rng, rng.choices((256, 2048), (0.8, 0.2))[0]) for _ in range(n))
    return [(conversation.messages(), conversation.thinking) for conversation in drawn]


def target_output(target_folder: Path, chats: list[tuple[Chat, bool]], device: str) -> list[Weighted]:
    """The chats with the target's greedy answers as token ids, weight 1.0 on the answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16).to(device).eval()
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
        for chat, thinking in chats
    ]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    with tqdm(total=len(prompts), desc="target's answers") as bar:
        answers = greedy_answers(model, prompts, progress=bar.update)
    return [
        (prompt + answer, [0.0] * len(prompt) + [1.0] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@dataclass(frozen=True)
class Blocks:
    """Blocks cut from rows: anchors and widths [rows, n], tokens and learnable [rows, n, BLOCK_SIZE]."""

    anchors: Tensor
    tokens: Tensor
    learnable: Tensor
    widths: Tensor


def cut_blocks(ids: Tensor, weights: Tensor, n: int, generator: torch.Generator, width: int | None = None) -> Blocks:
    """Draw `n` anchors per row inside the answers and the blocks that follow them, up to the answer's end."""
    answer = (weights == 1.0).float()
    can_start = answer[:, :-1] * answer[:, 1:]
    anchors = torch.multinomial(can_start + 1e-9, n, generator=generator)
    index = anchors[:, :, None] + torch.arange(BLOCK_SIZE)
    inside = index < ids.shape[1]
    index = index.clamp(max=ids.shape[1] - 1)
    gather = index.flatten(1)
    tokens = ids.gather(1, gather).view_as(index)
    in_answer = answer.gather(1, gather).view_as(index).bool() & inside
    widths = torch.tensor(VISIBLE_BLOCK_SIZES)[
        torch.randint(len(VISIBLE_BLOCK_SIZES), anchors.shape, generator=generator)
    ]
    widths = widths if width is None else torch.full_like(widths, width)
    learnable = in_answer.int().cumprod(-1).bool() & (torch.arange(BLOCK_SIZE) < widths[:, :, None])
    learnable[:, :, 0] = False  # the anchor is given
    return Blocks(anchors, tokens, learnable, widths)


def block_masks(config: DrafterConfig, blocks: Blocks, length: int) -> list[Tensor]:
    """Per layer, bool [rows, 1, n * B, length + n * B]: a block sees the context before it, and itself."""
    rows, n = blocks.anchors.shape
    start = blocks.anchors[:, :, None, None]  # [rows, n, 1, 1]
    query = start + torch.arange(BLOCK_SIZE)[:, None]
    context = torch.arange(length)
    own = start + torch.arange(BLOCK_SIZE)
    same_block = torch.eye(n, dtype=torch.bool)[None, :, None, :, None]  # [1, n, 1, n, 1]
    masks = []
    for layer_type in config.layer_types:
        sees_context = visible(layer_type, query, context, start, config.sliding_window) & (context < start)
        sees_own = visible(layer_type, query, own, start, config.sliding_window)
        sees_own = sees_own & (torch.arange(BLOCK_SIZE) < blocks.widths[:, :, None, None])
        sees_blocks = sees_own[:, :, :, None, :] & same_block
        mask = torch.cat((sees_context.flatten(1, 2), sees_blocks.flatten(3).flatten(1, 2)), dim=-1)
        masks.append(mask[:, None])
    return masks


def train_drafter(
    recipe: DrafterRecipe,
    target_folder: Path,
    data: list[Weighted],
    run: Path,
    out: Path,
    seed: int,
    device: str,
    mask_token_id: int | None = None,
    start: Path | None = None,
) -> list[LogEntry]:
    """Train a drafter for the target in `target_folder` and save it to `out`.

    The log's validation figure is the accept length, teacher-forced at block 16, on answers kept apart.

    Args:
        data: from `target_output`.
        mask_token_id: an id that no text contains, where the tokenizer has no mask token.
        start: a drafter of the same widths whose layers the new one starts from; layers it lacks start afresh.
    """
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_folder)
    target = transformers.AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).to(device).eval()
    target.requires_grad_(False)
    config = drafter_config(recipe, target, tokenizer.mask_token_id if mask_token_id is None else mask_token_id)
    drafter = Drafter(config)
    if start is not None:
        drafter.load_state_dict(Drafter.load(start).state_dict(), strict=False)
    drafter = drafter.to(device)
    pad = int(tokenizer.pad_token_id)
    n_kept = min(150, len(data) // 10)
    kept, trained = data[:n_kept], data[n_kept:]
    position_weight = torch.exp(-(torch.arange(BLOCK_SIZE) - 1) / LOSS_DECAY).to(device)

    def logits(ids: Tensor, blocks: Blocks) -> Tensor:
        """[rows, n * B, vocabulary]"""
        rows, length = ids.shape
        tokens = torch.full_like(blocks.tokens, config.mask_token_id)
        tokens[:, :, 0] = blocks.tokens[:, :, 0]
        positions = (blocks.anchors[:, :, None] + torch.arange(BLOCK_SIZE)).flatten(1).to(device)
        with autocast(torch.device(device)):
            with torch.no_grad():
                states = target.model(
                    input_ids=ids.to(device), output_hidden_states=True, use_cache=False
                ).hidden_states
            features = context_features(states, config.target_layer_ids)
            context = drafter.context_key_values(features, torch.arange(length, device=device).expand(rows, length))
            masks = [mask.to(device) for mask in block_masks(config, blocks, length)]
            embeddings = target.model.embed_tokens(tokens.flatten(1).to(device))
            return target.lm_head(drafter(embeddings, positions, context, masks))

    def rows_of(items: list[Weighted], length: int, rng: Random) -> tuple[Tensor, Tensor]:
        """A few rows packed from a random part of `items`."""
        need = ROWS[length] * length
        chosen: list[Weighted] = []
        while need > -2 * length:
            item = items[rng.randrange(len(items))]
            chosen.append(item)
            need -= len(item[0]) if len(item[0]) <= length else 0
        ids, weights = pack(chosen, length, pad)
        return ids[: ROWS[length]], weights[: ROWS[length]]

    def loss_of_step(i: int) -> Tensor:
        rng = Random(f"drafter-rows/{seed}/{i}")
        length = 2048 if rng.random() < LONG_SHARE else 256
        ids, weights = rows_of(trained, length, rng)
        blocks = cut_blocks(ids, weights, ANCHORS_PER_ROW[length], torch.Generator().manual_seed(seed * 10**6 + i))
        chosen = blocks.learnable.flatten(1).to(device)
        losses = F.cross_entropy(
            logits(ids, blocks)[chosen].float(), blocks.tokens.flatten(1).to(device)[chosen], reduction="none"
        )
        weight = position_weight.expand(blocks.tokens.shape).flatten(1)[chosen]
        return (losses * weight).sum() / weight.sum()

    kept_ids, kept_weights = rows_of(kept, 256, Random(0))
    kept_blocks = cut_blocks(kept_ids, kept_weights, 24, torch.Generator().manual_seed(0), width=BLOCK_SIZE)

    @torch.no_grad()
    def accept_length() -> float:
        guess = logits(kept_ids, kept_blocks).argmax(-1).view_as(kept_blocks.tokens).cpu()
        agrees = ((guess == kept_blocks.tokens) & kept_blocks.learnable)[:, :, 1:]
        return 1 + agrees.int().cumprod(-1).sum(-1).float().mean().item()

    log = train(drafter, loss_of_step, accept_length, recipe.steps, run)
    drafter.save(out)
    return log
