"""Rules that compare a drafter with its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sglang_dflash.drafter.checkpoint import TEMPLATE, TOKENIZER_CONFIG, ModelFiles, read_text
from sglang_dflash.drafter.tensors import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT, LoadReport
from sglang_dflash.errors import DFlashError, Finding, error, note, ok, warn
from sglang_dflash.launch.asked import Launch
from sglang_dflash.launch.layers import count
from sglang_dflash.launch.plan import check_window
from sglang_dflash.launch.settings import PLAIN_LAYERS

_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
SAMPLE = 64  # rows compared
_CODE = "AutoConfig"  # the only entry of auto_map that SGLang requests
_IN_CHATS = ("im_start", "im_end", "endoftext", "think", "tool")  # parts of added tokens that chats contain
ITS_DRAFTER = "use the drafter that was trained for this target"


def _code(launch: Launch) -> Iterator[Finding]:
    named = launch.drafter_files.config.get("auto_map")
    if launch.settings.trust_remote_code and isinstance(named, Mapping) and _CODE in named:
        yield error(
            f"--trust-remote-code would run the drafter's own code ({_CODE} {named[_CODE]!r} in its config.json)",
            remedy=f"take {_CODE} out of auto_map in the drafter's config.json, or leave --trust-remote-code out",
        )


def _same(key: str, targets_key: str, launch: Launch) -> Iterator[Finding]:
    ours, theirs = getattr(launch.drafter, key), launch.text.get(targets_key)
    if ours not in (theirs, None):
        yield error(f"{key} {ours} of the drafter, {theirs} of the target", remedy=ITS_DRAFTER)


def _layer_ids(launch: Launch) -> Iterator[Finding]:
    ids, actual = list(launch.drafter.target_layer_ids), count(launch.text, "num_hidden_layers")
    for layer in ids:
        # SGLang captures a layer's output at the next layer's input
        if layer >= actual - 1:
            yield error(
                f"target_layer_ids {ids}: {layer} is outside 0 to {actual - 2}, the layers that can be captured",
                remedy=ITS_DRAFTER,
            )


def _mask_token(launch: Launch) -> Iterator[Finding]:
    token, rows = launch.drafter.mask_token_id, launch.text.get("vocab_size")
    if isinstance(rows, int) and token >= rows:
        yield error(f"mask_token_id {token} is outside the target's {rows} embedding rows", remedy=ITS_DRAFTER)


def _block(launch: Launch) -> Iterator[Finding]:
    trained, block = launch.drafter.block_size, launch.settings.block
    if trained is None and block is None:
        yield error(
            "block_size is missing in the drafter's config.json and no flag sets it",
            remedy="set --speculative-num-draft-tokens to the block size that the drafter was trained with",
        )
    if trained is None or block is None or block <= trained:
        return
    if launch.widths is not None and launch.copies:
        yield ok(f"{block}: {trained} drafted, the rest copied")
    else:
        yield error(
            f"--speculative-num-draft-tokens {block} exceeds the drafter's block of {trained}",
            remedy=f"set {trained} or less, or add --speculative-adaptive to copy the rest",
        )


def _heads(launch: Launch) -> Iterator[Finding]:
    drafter, kv, tp = launch.drafter, launch.drafter.num_kv_heads, launch.settings.sharing
    kv_fits = kv % tp == 0 or tp % kv == 0  # with more ranks than KV heads, tp / kv ranks hold each head
    if not kv_fits or drafter.num_heads % tp or drafter.intermediate_size % tp:
        yield error(
            f"--tp-size {tp} must divide the drafter's {drafter.num_heads} heads, {kv} KV heads (or be a multiple) and "
            f"intermediate_size {drafter.intermediate_size}",
            remedy="choose another --tp-size",
        )


def _candidates(launch: Launch) -> Iterator[Finding]:
    top_k, vocab, tp = launch.drafter.selector_top_k, launch.drafter.vocab_size, launch.settings.sharing
    # SGLang pads to a multiple of 64, or of 64 per rank, and divides evenly; the last rank is short
    unit = 64 if -(-vocab // 64) * 64 % tp == 0 else 64 * tp
    smallest = vocab - (tp - 1) * (-(-vocab // unit) * unit // tp)
    if top_k > smallest:
        yield error(
            f"selector_top_k {top_k} exceeds the {max(smallest, 0)} tokens of a tensor-parallel rank",
            remedy="lower --tp-size",
        )


def _context(launch: Launch) -> Iterator[Finding]:
    own, configured = launch.context, launch.drafter.max_position_embeddings
    context = launch.settings.context_length or own
    if 0 < own < context and launch.settings.variable(_LONGER_CONTEXT).lower() not in ("true", "1", "yes", "y"):
        yield error(
            f"--context-length {context} exceeds the target's {own}, and SGLang refuses it",
            remedy=f"set --context-length {own}, or {_LONGER_CONTEXT}=1 and the RoPE scaling of the target's card",
        )
    if configured < context:
        yield warn(
            f"context length {context}, the drafter was configured for {configured}: positions beyond are extrapolated",
            remedy=f"set --context-length {configured}, or a --speculative-draft-window-size for the drafter",
        )


def _tensors(launch: Launch) -> Iterator[Finding]:
    tensors = launch.drafter_files.tensors
    if tensors is None:
        yield note("no safetensors header can be read", remedy="none needed: names and shapes are checked at load time")
        return
    report = LoadReport(launch.drafter)
    for _ in report.place((name, header.empty()) for name, header in tensors.items()):
        pass
    report.check(complete=True)


def _dtype(launch: Launch) -> Iterator[Finding]:
    if launch.dtype == "float16":
        yield warn(
            "the pair is served in float16, which hidden states of Qwen3 targets overflow: few drafts are accepted",
            remedy="set --dtype bfloat16 (or float32: SGLang's auto serves float32 checkpoints in float16)",
        )


def _drafter_quantisation(launch: Launch) -> Iterator[Finding]:
    layers = launch.settings.speculative_draft_model_quantization
    if layers not in (None, PLAIN_LAYERS):
        yield warn(
            f"--speculative-draft-model-quantization {layers}: SGLang's quantised layers, which are untested here",
            remedy="leave the flag out, or compare the accept length with and without it",
        )


def _vocabulary(launch: Launch) -> Iterator[Finding]:
    drafter, headers = launch.drafter, launch.drafter_files.tensors
    if not drafter.copies_vocabulary or (headers and not any(name.endswith((EMBEDDING, HEAD)) for name in headers)):
        return
    ids: Sequence[int] = range(drafter.vocab_size)  # of each row of the drafter's LM head
    if drafter.draft_vocab_size is not None:
        marked, offsets = map(launch.drafter_files.stored, (TARGET_TO_DRAFT, DRAFT_TO_TARGET))
        ids = [] if marked is None else marked.nonzero().flatten().tolist()
        mapped = ids if offsets is None else [row + offset for row, offset in enumerate(offsets.tolist())]
        if marked is not None and (len(ids) != drafter.draft_vocab_size or mapped != ids):
            yield error(
                f"t2d marks {len(ids)} tokens, d2t maps {len(mapped)}, draft_vocab_size is {drafter.draft_vocab_size}",
                remedy="download the drafter again, or ask its authors",
            )
    tied = launch.text.get("tie_word_embeddings", launch.target.get("tie_word_embeddings"))
    compared = False
    for name, source, tokens in (
        (EMBEDDING, EMBEDDING, range(drafter.vocab_size)),
        (HEAD, EMBEDDING if tied else HEAD, ids),
    ):
        rows = range(0, len(tokens), max(1, len(tokens) // SAMPLE))
        mine = launch.drafter_files.stored(name, rows)
        theirs = launch.target_files.stored(source, [tokens[row] for row in rows])
        if mine is None or theirs is None or not theirs.is_floating_point() or theirs.itemsize == 1:
            continue
        compared = True
        if mine.shape != theirs.shape or not (mine == theirs.to(mine.dtype)).all():
            yield error(
                f"the drafter's {name} differs from the target's, with which our worker drafts",
                remedy="use the drafter's own target; a drafter with a trained vocabulary is not served",
            )
    if not compared:
        yield warn(
            "the drafter may hold a separate embedding and LM head; the weights to compare are not downloaded yet",
            remedy="none needed if its trainer froze them, as speculators does; `sglang-dflash check` compares later",
        )


def _tokenizer(launch: Launch) -> Iterator[Finding]:
    ours, theirs = launch.drafter_files.json("tokenizer.json"), launch.tokenizer
    if theirs is None:
        yield warn("the target has no tokenizer.json", remedy="check --tokenizer-path")
    elif ours is not None and (_added_tokens(ours), _words(ours)) != (_added_tokens(theirs), _words(theirs)):
        yield error("the drafter's tokenizer.json differs from the target's", remedy=ITS_DRAFTER)


def _mask_token_name(launch: Launch) -> Iterator[Finding]:
    token, tokenizer = launch.drafter.mask_token_id, launch.tokenizer or {}
    added, words = _added_tokens(tokenizer), _words(tokenizer)
    ordinary = [word for word, index in words.items() if index == token] if isinstance(words, dict) else []
    name = added.get(token) or next(iter(ordinary), None)
    if name is None or (token in added and not any(word in name for word in _IN_CHATS)):
        return
    # some trainers fall back to the padding token
    level, kind = (note, "a token that chats contain") if token in added else (warn, "an ordinary token")
    yield level(
        f"mask_token_id {token} is {name!r}, {kind}: unless the drafter was trained with it, nearly every draft is "
        "rejected (`sglang-dflash diagnose` shows it)",
        remedy="compare mask_token_id with the drafter's card and training, and the target with the drafter's",
    )


def _words(tokenizer: Mapping[str, Any]) -> Any:
    model = tokenizer.get("model")
    return (model.get("vocab") if isinstance(model, Mapping) else None) or {}


def _chat_template(launch: Launch) -> Iterator[Finding]:
    template = launch.settings.chat_template or _template_of(launch.target_files)
    if template is None:
        yield warn(
            "the target has no chat template",
            remedy="set --chat-template: drafters are trained on templated text, raw prompts draft worse",
        )
    elif "enable_thinking" in template:
        yield ok("has a thinking switch: set it as the drafter's card did (chat_template_kwargs)")


def _template_of(files: ModelFiles) -> str | None:
    path = files.path(TEMPLATE)
    template = read_text(path) if path else (files.json(TOKENIZER_CONFIG) or {}).get("chat_template")
    return str(template) if template else None


def _added_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    try:
        return {int(entry["id"]): str(entry["content"]) for entry in tokenizer.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DFlashError(
            f"added_tokens of a tokenizer.json cannot be read ({error!r})", remedy="download the model again"
        ) from None


DRAFTER_RULES: dict[str, Callable[[Launch], Iterator[Finding]]] = {
    "drafter's code": _code,
    "hidden size": partial(_same, "hidden_size", "hidden_size"),
    "vocabulary": partial(_same, "vocab_size", "vocab_size"),
    "target's layers": partial(_same, "num_target_layers", "num_hidden_layers"),
    "target_layer_ids": _layer_ids,
    "mask token": _mask_token,
    "block size": _block,
    "heads by tensor parallelism": _heads,
    "candidates": _candidates,
    "draft window": check_window,
    "context length": _context,
    "drafter's tensors": _tensors,
    "dtype": _dtype,
    "drafter's quantisation": _drafter_quantisation,
    "drafter's vocabulary": _vocabulary,
    "tokenizer": _tokenizer,
    "mask token's name": _mask_token_name,
    "chat template": _chat_template,
}
