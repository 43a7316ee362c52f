"""Does this drafter fit this target? Two configurations and a few server arguments in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_dflash.check.findings import Finding, judge
from sglang_dflash.drafter.config import DrafterConfig, text_config
from sglang_dflash.errors import DFlashError, Doubt
from sglang_dflash.plan.pair import asked_block, copies_fill_blocks
from sglang_dflash.plan.window import context_window

_ITS_DRAFTER = "use the drafter that was trained for this target"


def check_pair(drafter: DrafterConfig, target: Mapping[str, Any], args: Any) -> Iterator[Finding]:
    """Compare a drafter with its target.

    Args:
        drafter: the parsed drafter configuration.
        target: the target's ``config.json``.
        args: the server arguments that both must fit, by SGLang's names.

    Yields:
        One finding a check, errors included; never raises for a pair that does not fit.
    """
    text = text_config(target)
    yield judge("hidden size", _same, "hidden_size", drafter.hidden_size, text)
    yield judge("vocabulary", _same, "vocab_size", drafter.vocab_size, text)
    yield judge("target's layers", _target_layers, drafter, text)
    yield judge("target_layer_ids", _layer_ids, drafter, text)
    yield judge("mask token", _mask_token, drafter, text)
    yield judge("block size", _block, drafter.block_size, args)
    yield judge("heads by tensor parallelism", _heads, drafter, args.tp_size)
    yield judge("drafter's layers", _layers, drafter)
    yield judge("draft window", _window, drafter, args)
    yield judge("context length", _context, drafter, text, args)


def _same(key: str, drafter_value: int, text: Mapping[str, Any]) -> str:
    target_value = text.get(key)
    if drafter_value == target_value:
        return str(target_value)
    raise DFlashError(
        f"{key} {drafter_value} of the drafter, {target_value} of the target",
        expected="the same: the drafter uses the target's embedding, LM head and hidden states",
        remedy=_ITS_DRAFTER,
    )


def _target_layers(drafter: DrafterConfig, text: Mapping[str, Any]) -> str:
    actual = text.get("num_hidden_layers")
    if drafter.num_target_layers == actual:
        return str(actual)
    if drafter.num_target_layers is None:
        raise Doubt(
            f"the drafter does not state num_target_layers; the target has {actual}",
            expected=f"num_target_layers {actual}",
            remedy="make sure that the drafter was trained for this target",
        )
    raise DFlashError(
        f"num_target_layers {drafter.num_target_layers} of the drafter, the target has {actual} layers",
        expected="the target that the drafter was trained with",
        remedy=_ITS_DRAFTER,
    )


def _layer_ids(drafter: DrafterConfig, text: Mapping[str, Any]) -> str:
    ids, actual = drafter.target_layer_ids, text.get("num_hidden_layers")
    if not isinstance(actual, int):
        raise DFlashError(
            f"num_hidden_layers {actual!r} in the target's config.json",
            expected="an integer",
            remedy="check the target's config.json",
        )
    beyond = [layer for layer in ids if layer >= actual - 1]
    if not beyond:
        return f"{list(ids)} of {actual}"
    raise DFlashError(
        f"target_layer_ids {list(ids)}: {beyond[0]} cannot be captured in a target of {actual} layers",
        # SGLang captures a layer's output as the next layer reads it, and nothing reads the last one's.
        expected=f"layers 0 to {actual - 2}",
        remedy=_ITS_DRAFTER,
    )


def _mask_token(drafter: DrafterConfig, text: Mapping[str, Any]) -> str:
    rows = text.get("vocab_size")
    if isinstance(rows, int) and drafter.mask_token_id >= rows:
        raise DFlashError(
            f"mask_token_id {drafter.mask_token_id}, the target's embedding has {rows} rows",
            expected=f"an id from 0 to {rows - 1}",
            remedy=_ITS_DRAFTER,
        )
    special = [text.get(key) for key in ("eos_token_id", "pad_token_id", "bos_token_id")]
    if drafter.mask_token_id in special:
        raise Doubt(
            f"mask_token_id {drafter.mask_token_id} is also the target's eos, pad or bos token",
            expected="an id of its own",
            remedy="check it against the drafter's training: a wrong mask token ruins acceptance",
        )
    return str(drafter.mask_token_id)


def _block(trained: int | None, args: Any) -> str:
    asked = asked_block(args)
    if asked is not None and asked < 2:
        raise DFlashError(
            f"block size {asked} (--speculative-num-draft-tokens)",
            expected="2 or more: the anchor and at least one drafted token",
            remedy=f"set --speculative-num-draft-tokens {trained or 16}",
        )
    if trained is None and asked is None:
        raise DFlashError(
            "block_size is missing in the drafter's config.json and no flag sets it",
            expected="a block size",
            remedy="set --speculative-num-draft-tokens to the block size that the drafter was trained with",
        )
    if trained is not None and asked is not None and asked > trained:
        if copies_fill_blocks(args):
            return f"{asked}: {trained} drafted, the rest copied"
        raise DFlashError(
            f"block size {asked} (--speculative-num-draft-tokens), the drafter was trained with {trained}",
            expected=f"2 to {trained}, or --speculative-adaptive, where more than {trained} are for copied blocks",
            remedy=f"set --speculative-num-draft-tokens {trained} or less, or leave it out",
        )
    return f"{asked or trained}" + (f" of {trained}" if trained else "")


def _heads(drafter: DrafterConfig, tp: int) -> str:
    kv = drafter.num_kv_heads
    # More ranks than KV heads: each KV head is held by tp / kv ranks.
    kv_fits = kv % tp == 0 or tp % kv == 0
    if kv_fits and drafter.num_heads % tp == 0 and drafter.intermediate_size % tp == 0:
        return f"{drafter.num_heads} heads, {kv} KV heads, TP {tp}"
    raise DFlashError(
        f"--tp-size {tp} with the drafter's {drafter.num_heads} heads, {kv} KV heads, "
        f"intermediate_size {drafter.intermediate_size}",
        expected="a divisor of heads and intermediate_size that divides, or is a multiple of, KV heads",
        remedy="choose another --tp-size",
    )


def _layers(drafter: DrafterConfig) -> str:
    shapes = [
        ("causal " if causal else "") + kind.removesuffix("_attention")
        for kind, causal in zip(drafter.layer_types, drafter.causal, strict=True)
    ]
    counts = ", ".join(f"{shapes.count(shape)} {shape}" for shape in dict.fromkeys(shapes))
    window = f", window {drafter.sliding_window}" if drafter.sliding_window else ""
    return counts + window


def _window(drafter: DrafterConfig, args: Any) -> str:
    window = args.speculative_draft_window_size
    if window is None:
        return "none: full layers read the whole context"
    block = asked_block(args) or drafter.block_size or 2
    if window < block:
        raise DFlashError(
            f"--speculative-draft-window-size {window}, block size {block}",
            expected=f"{block} or more",
            remedy="choose a window of at least one block; 2048 or 4096 are usual",
        )
    reads = context_window(window, drafter)
    assert reads is not None  # a window was asked for
    if "full_attention" not in drafter.layer_types:
        return f"{reads} tokens, as every layer slides: the flag only bounds the drafter's K/V"
    if reads != window:
        return f"{reads} tokens: not {window}, because sliding layers keep their window of {reads + 1}"
    return f"{window} tokens for full-attention layers"


def _context(drafter: DrafterConfig, text: Mapping[str, Any], args: Any) -> str:
    context = args.context_length or text.get("max_position_embeddings")
    own = drafter.max_position_embeddings
    if not isinstance(context, int) or own >= context:
        return f"{context}, drafter {own}"
    raise Doubt(
        f"context length {context}, the drafter was configured for {own}: positions beyond are extrapolated",
        expected=f"a context of at most {own} tokens for the published accept length",
        remedy=f"set --context-length {own}, or a --speculative-draft-window-size for the drafter",
    )
