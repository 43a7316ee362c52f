"""Rules of a pair: two configurations, headers and small files in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.checkpoint import ModelFiles, StoredTensors, TensorHeader
from sglang_dflash.drafter.config import DrafterConfig, quantization, text_config
from sglang_dflash.drafter.formats import FULL
from sglang_dflash.drafter.template import added_tokens, chat_template
from sglang_dflash.drafter.tensors import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT, LoadReport
from sglang_dflash.errors import DFlashError, Doubt
from sglang_dflash.plan.findings import Finding, judge, of_error
from sglang_dflash.plan.pair import Pair, served_dtype
from sglang_dflash.plan.plan import chooses_copies
from sglang_dflash.plan.serving import context_window
from sglang_dflash.plan.settings import PLAIN_LAYERS, Settings
from sglang_dflash.plan.widths import WidthConfig

if TYPE_CHECKING:
    from torch import Tensor


_ITS_DRAFTER = "use the drafter that was trained for this target"


def pair_findings(settings: Settings, pair: Pair) -> Iterator[Finding]:
    """Findings on a pair that this package serves.

    Raises:
        DFlashError: a configuration or the width file cannot be read, or the drafter is no plain DFlash drafter.
    """
    drafter, target, files = pair.drafter, pair.target, (pair.drafter_files, pair.target_files)
    pair.hybrid  # noqa: B018  # raises where the target's layers cannot be counted
    tensors, names = pair.drafter_files.tensors, target.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "?"
    yield Finding("ok", "architecture", f"{architecture} + DFlashDraftModel")
    yield judge("drafter's code", check_code, pair.drafter_files.config, bool(settings.trust_remote_code))
    yield from check_pair(drafter, target, settings, pair.widths)
    yield from check_weights(drafter, tensors, target, settings.dtype, settings.speculative_draft_model_quantization)
    yield from check_vocabulary(drafter, *files)
    yield from check_tokens(drafter, *files, settings.chat_template)


def check_pair(
    drafter: DrafterConfig, target: Mapping[str, Any], settings: Settings, widths: WidthConfig | None = None
) -> Iterator[Finding]:
    """Compare a drafter with its target: one finding per rule, errors included.

    Args:
        target: the target's ``config.json``.
        widths: the adaptive widths; None for a fixed block.
    """
    text = text_config(target)
    yield judge("hidden size", _same, "hidden_size", drafter.hidden_size, text)
    yield judge("vocabulary", _same, "vocab_size", drafter.vocab_size, text)
    yield judge("target's layers", _target_layers, drafter, text)
    yield judge("target_layer_ids", _layer_ids, drafter, text)
    yield judge("mask token", _mask_token, drafter, text)
    yield judge("block size", _block, drafter.block_size, settings, widths)
    yield judge("heads by tensor parallelism", _heads, drafter, settings.tp_size)
    yield judge("drafter's layers", _layers, drafter)
    yield judge("draft window", _window, drafter, settings)
    yield judge("context length", _context, drafter, text, settings)


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
            expected="an id that the tokenizer does not use",
            remedy="check it against the drafter's training: a wrong mask token ruins acceptance",
        )
    return str(drafter.mask_token_id)


def _block(trained: int | None, settings: Settings, widths: WidthConfig | None) -> str:
    asked = settings.block
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
        if widths is not None and chooses_copies(settings, widths):
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


def _window(drafter: DrafterConfig, settings: Settings) -> str:
    window = settings.speculative_draft_window_size
    if window is None:
        return "none: full layers read the whole context"
    block = settings.block or drafter.block_size or 2
    if window < block:
        raise DFlashError(
            f"--speculative-draft-window-size {window}, block size {block}",
            expected=f"{block} or more",
            remedy="choose a window of at least one block; 2048 or 4096 are usual",
        )
    reads = context_window(window, drafter)
    assert reads is not None  # a window was asked for
    if FULL not in drafter.layer_types:
        return f"{reads} tokens, as every layer slides: the flag only bounds the drafter's K/V"
    if reads != window:
        return f"{reads} tokens: not {window}, because sliding layers keep their window of {reads + 1}"
    return f"{window} tokens for full-attention layers"


def _context(drafter: DrafterConfig, text: Mapping[str, Any], settings: Settings) -> str:
    context = settings.context_length or text.get("max_position_embeddings")
    own = drafter.max_position_embeddings
    if not isinstance(context, int) or own >= context:
        return f"{context}, drafter {own}"
    raise Doubt(
        f"context length {context}, the drafter was configured for {own}: positions beyond are extrapolated",
        expected=f"a context of at most {own} tokens for the published accept length",
        remedy=f"set --context-length {own}, or a --speculative-draft-window-size for the drafter",
    )


_KEY = "AutoConfig"  # the only entry of auto_map that SGLang asks transformers for; weights load into our own classes


def check_code(config: Mapping[str, Any], trusted: bool) -> str:
    """Describe the code in a drafter's folder.

    Args:
        config: its ``config.json``.
        trusted: ``--trust-remote-code``.

    Raises:
        DFlashError: SGLang would run it.
    """
    named = config.get("auto_map")
    if not trusted or not isinstance(named, Mapping) or _KEY not in named:
        return "none is executed"
    raise DFlashError(
        f"--trust-remote-code would run the drafter's own code ({_KEY} {named[_KEY]!r} in its config.json)",
        expected="a drafter without code: sglang-dflash has the drafter's model built in",
        remedy=f"take {_KEY} out of auto_map in the drafter's config.json, or leave --trust-remote-code out",
    )


def check_weights(
    drafter: DrafterConfig,
    tensors: Mapping[str, TensorHeader] | None,
    target: Mapping[str, Any],
    dtype: str,
    layers: str | None = None,
) -> Iterator[Finding]:
    """Findings on the drafter's tensors, dtype and quantisation.

    Args:
        drafter: the parsed configuration.
        tensors: the drafter's headers, None if none could be read.
        target: the target's ``config.json``.
        dtype: ``--dtype``.
        layers: ``--speculative-draft-model-quantization``.
    """
    yield judge("drafter's tensors", _tensors, drafter, tensors)
    served = served_dtype(target, dtype)
    yield judge("dtype", _dtype, drafter, served)
    yield judge("quantisation", _quantization, drafter, target, served, layers)


def _tensors(drafter: DrafterConfig, tensors: Mapping[str, TensorHeader] | None) -> str:
    """Compare names and shapes with the configuration, by the loader's own rules."""
    if tensors is None:
        raise Doubt(
            "no safetensors header can be read",
            expected="a safetensors checkpoint",
            remedy="none needed: names and shapes are checked at load time",
        )
    report = LoadReport(drafter)
    for _ in report.place((name, header.empty()) for name, header in tensors.items()):
        pass
    report.check(complete=True)
    return f"{len(tensors)}, as config.json describes them"


def _dtype(drafter: DrafterConfig, served: str) -> str:
    if served != "float16":
        return f"{served}, drafter stored in {drafter.dtype or 'an unstated dtype'}"
    raise Doubt(
        "the pair is served in float16",
        expected="bfloat16 or float32: hidden states of Qwen3 targets overflow float16 and acceptance collapses",
        remedy="set --dtype bfloat16 (or float32: SGLang's auto serves float32 checkpoints in float16)",
    )


def _quantization(drafter: DrafterConfig, target: Mapping[str, Any], served: str, layers: str | None) -> str:
    if layers not in (None, PLAIN_LAYERS):
        raise Doubt(
            f"--speculative-draft-model-quantization {layers}: SGLang's quantised layers, which are untested here",
            expected="plain layers, into which a quantised drafter is dequantised",
            remedy="leave the flag out, or compare the accept length with and without it",
        )
    drafters = f"{drafter.stored.method}, dequantised to {served} when loaded" if drafter.stored else "none"
    return f"target {quantization(target) or 'none'}, drafter {drafters}"


SAMPLE = 64  # rows of each table that are compared
# Parts of added tokens that chats do contain.
_IN_TEXTS = ("im_start", "im_end", "endoftext", "think", "tool")


def check_tokens(
    drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles, given_template: str | None
) -> Iterator[Finding]:
    """Findings on tokenizer, mask token and chat template.

    Args:
        given_template: ``--chat-template``.
    """
    try:
        tokenizer = target_files.json("tokenizer.json")
    except DFlashError as raised:
        yield of_error("tokenizer", raised)
        return
    yield judge("tokenizer", _tokenizer, drafter_files, tokenizer)
    yield judge("mask token's name", _mask_token_name, drafter.mask_token_id, tokenizer or {})
    yield judge("chat template", _chat_template, target_files, given_template)


def _tokenizer(drafter_files: ModelFiles, targets: Mapping[str, Any] | None) -> str:
    drafters = drafter_files.json("tokenizer.json")
    if targets is None:
        raise Doubt(
            "the target has no tokenizer.json",
            expected="the tokenizer that the drafter was trained with",
            remedy="check --tokenizer-path",
        )
    if drafters is None or (added_tokens(drafters), _vocabulary(drafters)) == (
        added_tokens(targets),
        _vocabulary(targets),
    ):
        return "the target's"
    raise DFlashError(
        "the drafter's tokenizer.json differs from the target's",
        expected="one tokenizer: drafted ids are the target's ids",
        remedy="use the drafter that was trained for this target",
    )


def _mask_token_name(token: int, tokenizer: Mapping[str, Any]) -> str:
    added, words = added_tokens(tokenizer), _vocabulary(tokenizer)
    ordinary = [word for word, index in words.items() if index == token] if isinstance(words, dict) else []
    name = added.get(token) or next(iter(ordinary), None)
    if name is None:
        return "an unused row of the embedding"
    if token in added and not any(word in name for word in _IN_TEXTS):
        return name
    raise Doubt(
        f"mask_token_id {token} is {name!r} in the target's tokenizer",
        expected="a token that no text contains",
        remedy="check it against the drafter's training: a wrong mask token ruins acceptance",
    )


def _chat_template(target_files: ModelFiles, given: str | None) -> str:
    if given:
        return f"{given} (--chat-template)"
    template = chat_template(target_files)
    if template is None:
        raise Doubt(
            "the target has none",
            expected="the template that the drafter was trained with",
            remedy="set --chat-template: drafters are trained on templated text, raw prompts draft worse",
        )
    if "enable_thinking" not in template:
        return "no thinking switch"
    return "has a thinking switch: set it as the drafter's card did (chat_template_kwargs)"


def _vocabulary(tokenizer: Mapping[str, Any]) -> Any:
    """The model's words: ids by word, or a list in the order of ids."""
    model = tokenizer.get("model")
    return (model.get("vocab") if isinstance(model, Mapping) else None) or {}


def check_vocabulary(drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles) -> Iterator[Finding]:
    """Findings on the embedding and LM head that a drafter's checkpoint may hold."""
    if drafter.copies_vocabulary:
        yield judge("drafter's vocabulary", _own_vocabulary, drafter, drafter_files, target_files)


def _own_vocabulary(drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles) -> str:
    headers = drafter_files.tensors
    if headers and not any(name.endswith((EMBEDDING, HEAD)) for name in headers):
        return "the target's: the checkpoint holds no copy"

    own, target = StoredTensors(drafter_files), StoredTensors(target_files)
    ids = _drafted_ids(drafter, own)
    text = text_config(target_files.config)
    tied = text.get("tie_word_embeddings", target_files.config.get("tie_word_embeddings"))
    compared = [
        _compare(EMBEDDING, own, range(drafter.vocab_size), target, EMBEDDING),
        _compare(HEAD, own, ids, target, EMBEDDING if tied else HEAD),
    ]
    if not any(compared):
        raise Doubt(
            "the drafter may hold a separate embedding and LM head; the weights to compare are not downloaded yet",
            expected="copies of the target's, which are used in their place",
            remedy="none needed if its trainer froze them, as speculators does; `sglang-dflash check` compares later",
        )
    return f"the target's ({' and '.join(filter(None, compared))} compared), {len(ids)} tokens to draft from"


def _drafted_ids(drafter: DrafterConfig, own: StoredTensors) -> list[int] | range:
    """Target ids of the rows of the drafter's head.

    Raises:
        DFlashError: the two maps do not describe the vocabulary that ``config.json`` states.
    """
    if drafter.draft_vocab_size is None:
        return range(drafter.vocab_size)
    marked, offsets = own.read(TARGET_TO_DRAFT), own.read(DRAFT_TO_TARGET)
    if marked is None:
        return range(drafter.draft_vocab_size)  # not downloaded yet: nothing is compared
    ids: list[int] = marked.nonzero().flatten().tolist()
    mapped = ids if offsets is None else [row + int(offset) for row, offset in enumerate(offsets.tolist())]
    if len(ids) != drafter.draft_vocab_size or mapped != ids:
        raise DFlashError(
            f"t2d marks {len(ids)} tokens, d2t maps {len(mapped)}, draft_vocab_size is {drafter.draft_vocab_size}",
            expected="one vocabulary, in the order of its token ids",
            remedy="download the drafter again, or ask its authors",
        )
    return ids


def _compare(name: str, own: StoredTensors, ids: list[int] | range, target: StoredTensors, source: str) -> str | None:
    """``name`` if a sample of its rows, which are those of token ``ids``, is the target's; None if one is absent."""
    rows = sorted({round(i * (len(ids) - 1) / (SAMPLE - 1)) for i in range(SAMPLE)})
    mine, theirs = own.read(name, rows), target.read(source, [ids[row] for row in rows])
    if mine is None or theirs is None or not theirs.is_floating_point() or theirs.itemsize == 1:
        return None
    if _equal(mine, theirs):
        return name
    raise DFlashError(
        f"the drafter's {name} is not the target's",
        expected="a copy: our worker drafts with the target's embedding and LM head",
        remedy="use the target that the drafter was trained for; a drafter with a trained vocabulary is not served",
    )


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and bool((mine == theirs.to(mine.dtype)).all())
