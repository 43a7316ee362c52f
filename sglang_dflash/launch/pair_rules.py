"""Rules that compare a drafter with its target."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from sglang_dflash.drafter.checkpoint import TOKENIZER
from sglang_dflash.drafter.quantisation import is_read, method_of, untested_form
from sglang_dflash.drafter.tensors import EMBEDDING, HEAD, LoadReport
from sglang_dflash.errors import DFlashError, Finding, builtin, error, note, ok, warn
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.published import base_name, card_of_drafter, card_of_target, model_name
from sglang_dflash.launch.settings import PLAIN_LAYERS
from sglang_dflash.launch.sizes import count

_FLAG = "--speculative-draft-model-quantization"
_CODE = "AutoConfig"  # the only entry of auto_map that SGLang requests
ITS_DRAFTER = "use the drafter that was trained for this target"


def _trained_for(launch: Launch) -> Iterator[Finding]:
    drafter, target, config = launch.drafter_files.name, launch.settings.model_path, launch.drafter_files.published
    card, own = card_of_drafter(drafter), launch.target.get("_name_or_path")
    trained = card["target"] if card else _stated_target(config)
    if trained is None:
        return
    served = {base_name(name) for name in (target, own) if isinstance(name, str) and name}
    if base_name(trained) in served:
        of_base = card and model_name(target) not in (model_name(trained), base_name(target))
        level, whose = (note, f", the base model of {target}") if of_base else (ok, "")
        yield level(f"{drafter} was trained for {trained}{whose}", remedy="none needed")
    elif card_of_target(target) or own or not launch.target_files.is_local:  # a folder may have any name
        right = card_of_target(target)
        yield warn(
            f"{drafter} was trained for {trained}, and the target is {target}: most drafts may be rejected",
            remedy=f"use {right['drafter'] if right else 'a drafter of this target'}, or compare the accept length "
            "(`sglang-dflash diagnose`)",
        )


def _stated_target(config: Mapping[str, Any]) -> str | None:
    """Return the target that a trainer wrote into the drafter's configuration."""
    part: Any = config.get("speculators_config")
    part = part.get("verifier") if isinstance(part, Mapping) else None
    named = part.get("name_or_path") if isinstance(part, Mapping) else None
    named = named or config.get("target_model_name_or_path") or config.get("_name_or_path")
    return named if isinstance(named, str) and named and "dflash" not in named.lower() else None


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
    elif ours is not None:
        yield ok(f"{ours} = {theirs}")


def _layer_ids(launch: Launch) -> Iterator[Finding]:
    ids, actual = list(launch.drafter.target_layer_ids), count(launch.text, "num_hidden_layers")
    for layer in ids:
        # SGLang captures a layer's output at the next layer's input
        if layer >= actual - 1:
            yield error(
                f"target_layer_ids {ids}: {layer} is outside 0 to {actual - 2}, the layers that can be captured",
                remedy=ITS_DRAFTER,
            )
    if max(ids, default=0) < actual - 1:
        yield ok(f"{ids} of {actual}")


def _mask_token(launch: Launch) -> Iterator[Finding]:
    token, rows = launch.drafter.mask_token_id, launch.text.get("vocab_size")
    if isinstance(rows, int) and token >= rows:
        yield error(f"mask_token_id {token} is outside the target's {rows} embedding rows", remedy=ITS_DRAFTER)
    else:
        yield ok(f"{token} of {rows}")


def _block(launch: Launch) -> Iterator[Finding]:
    trained, block = launch.drafter.block_size, launch.settings.block
    if trained is None and block is None:
        yield error(
            "block_size is missing in the drafter's config.json and no flag sets it",
            remedy="set --speculative-num-draft-tokens to the block size that the drafter was trained with",
        )
    elif trained is None or block is None or block <= trained:
        yield ok(f"{block or trained}, trained with {trained or 'an unknown one'}")
    elif launch.widths is not None:
        yield ok(f"{block}: {trained} drafted, the rest copied")
    else:
        yield error(
            f"--speculative-num-draft-tokens {block} exceeds the drafter's block of {trained}",
            remedy=f"set {trained} or less, or add --speculative-adaptive to copy the rest",
        )


def _heads(launch: Launch) -> Iterator[Finding]:
    drafter, kv, tp = launch.drafter, launch.drafter.num_kv_heads, launch.settings.sharing

    def fits(tp: int) -> bool:  # with more ranks than KV heads, tp / kv ranks hold each head
        return (kv % tp == 0 or tp % kv == 0) and drafter.num_heads % tp == 0 and drafter.intermediate_size % tp == 0

    heads = f"{drafter.num_heads} heads, {kv} KV heads, intermediate_size {drafter.intermediate_size}"
    if fits(tp):
        yield ok(f"{heads} over {tp}")
    else:
        sizes = [str(size) for size in (1, 2, 4, 8, 16) if fits(size)]
        yield error(f"--tp-size {tp} does not divide the drafter's {heads}", remedy=f"use {' or '.join(sizes)} ranks")


def _context(launch: Launch) -> Iterator[Finding]:
    context, configured = launch.settings.context_length or launch.context, launch.drafter.max_position_embeddings
    if configured < context:
        yield warn(
            f"context length {context}, the drafter was configured for {configured}: positions beyond are extrapolated",
            remedy=f"set --context-length {configured}, or a --speculative-draft-window-size for the drafter",
        )
    else:
        yield ok(f"{context or 'unknown'}, configured for {configured}")


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


def no_cpu_serves(what: str, launch: Launch) -> Iterator[Finding]:
    if launch.device.kind == "cpu":
        remedy = "use the drafter's plain weights here, or serve the pair on a GPU (check it with --gpu)"
        yield error(f"{what}: no CPU serves it", remedy=remedy)


def _quantisation(launch: Launch) -> Iterator[Finding]:
    stored, flag = launch.drafter_files.quantisation, launch.settings.speculative_draft_model_quantization
    flag = None if flag == PLAIN_LAYERS else flag
    if (method := method_of(stored) if stored else flag) is None:
        return
    plain = "use the drafter's plain weights"
    yield from no_cpu_serves(f"the quantised drafter {launch.drafter_files.name} ({method})", launch)
    if launch.dtype == "float32":
        yield error(
            f"a quantised drafter ({method}) in float32: SGLang's layers need 16 bits",
            remedy=f"{plain}, or set --dtype bfloat16",
        )
    untested = untested_form(stored) if stored else None
    if stored and untested and not is_read(stored):
        yield error(f"the drafter is quantised by {untested}, for which SGLang has no layers", remedy=plain)
    elif untested:
        yield builtin(f"the drafter is quantised by {untested}")
    if flag and not stored:
        yield warn(
            f"{_FLAG} {flag} quantises a plain drafter when it is loaded, which is untested here",
            remedy=f"leave {_FLAG} out, or compare the accept length with and without it",
        )


def _vocabulary(launch: Launch) -> Iterator[Finding]:
    drafter, headers = launch.drafter, launch.drafter_files.tensors
    if drafter.copies_vocabulary and (not headers or any(name.endswith((EMBEDDING, HEAD)) for name in headers)):
        yield warn(
            "the drafter may hold a separate embedding and LM head, and the target's are used in their place",
            remedy="none needed if its trainer froze them, as speculators does",
        )


def _tokenizer(launch: Launch) -> Iterator[Finding]:
    ours, theirs = (files.json(TOKENIZER) for files in (launch.drafter_files, launch.target_files))
    if theirs is None:
        yield warn("the target has no tokenizer.json", remedy="check --tokenizer-path")
    elif ours is not None and (_added_tokens(ours), _words(ours)) != (_added_tokens(theirs), _words(theirs)):
        yield error("the drafter's tokenizer.json differs from the target's", remedy=ITS_DRAFTER)


def _words(tokenizer: Mapping[str, Any]) -> Any:
    model = tokenizer.get("model")
    return (model.get("vocab") if isinstance(model, Mapping) else None) or {}


def _added_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    try:
        return {int(entry["id"]): str(entry["content"]) for entry in tokenizer.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DFlashError(
            f"added_tokens of a tokenizer.json cannot be read ({error!r})", remedy="download the model again"
        ) from None


DRAFTER_RULES: dict[str, Callable[[Launch], Iterator[Finding]]] = {
    "target of the drafter": _trained_for,
    "drafter's code": _code,
    "hidden size": partial(_same, "hidden_size", "hidden_size"),
    "vocabulary": partial(_same, "vocab_size", "vocab_size"),
    "target's layers": partial(_same, "num_target_layers", "num_hidden_layers"),
    "target_layer_ids": _layer_ids,
    "mask token": _mask_token,
    "block size": _block,
    "heads by tensor parallelism": _heads,
    "context length": _context,
    "drafter's quantisation": _quantisation,
    "drafter's tensors": _tensors,
    "dtype": _dtype,
    "drafter's vocabulary": _vocabulary,
    "tokenizer": _tokenizer,
}
