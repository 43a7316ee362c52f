"""Tokenizer, chat template and dtype: what makes a pair that starts draft badly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dflash.check.findings import Finding, error, ok, warn
from sglang_dflash.drafter.config import DrafterConfig, quantization, text_config
from sglang_dflash.drafter.files import ModelFiles

# Parts of added tokens that chats do contain.
_IN_TEXTS = ("im_start", "im_end", "endoftext", "think", "tool")


def check_text(drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles) -> Iterator[Finding]:
    """Tokenizers and chat template, from the small files beside the two configurations."""
    yield _tokenizer(drafter_files, target_files)
    yield _mask_token_name(drafter, target_files)
    yield _chat_template(target_files)


def check_dtypes(drafter: DrafterConfig, target: Any, dtype: str) -> Iterator[Finding]:
    """Dtypes and quantisation.

    Args:
        drafter: the parsed drafter configuration.
        target: the target's ``config.json``.
        dtype: ``--dtype``.
    """
    yield _dtype(drafter, served_dtype(target, dtype))
    about = "quantisation"
    if method := drafter.quantization:
        yield warn(
            about,
            f"the drafter is quantised ({method})",
            expected="plain weights, or a method that SGLang's linear layers load",
            remedy="compare its accept length with the plain drafter's",
        )
    else:
        yield ok(about, f"target {quantization(target) or 'none'}, drafter none")


def served_dtype(config: Any, dtype: str) -> str:
    """The dtype SGLang computes in: its ``auto`` serves float32 checkpoints in float16."""
    stated = text_config(config).get("dtype") or text_config(config).get("torch_dtype") or config.get("dtype")
    if dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(dtype, dtype)
    return "float16" if stated in (None, "float32") else str(stated)


def _dtype(drafter: DrafterConfig, target_dtype: str) -> Finding:
    about = "dtype"
    if target_dtype == "float16":
        return warn(
            about,
            "the pair is served in float16",
            expected="bfloat16 or float32: hidden states of Qwen3 targets overflow float16 and acceptance collapses",
            remedy="set --dtype bfloat16 (or float32: SGLang's auto serves float32 checkpoints in float16)",
        )
    return ok(about, f"{target_dtype}, drafter stored in {drafter.dtype or 'an unstated dtype'}")


def _tokenizer(drafter_files: ModelFiles, target_files: ModelFiles) -> Finding:
    about = "tokenizer"
    own, targets = drafter_files.path("tokenizer.json"), target_files.path("tokenizer.json")
    if targets is None:
        return warn(
            about,
            "the target has no tokenizer.json",
            expected="the tokenizer that the drafter was trained with",
            remedy="check --tokenizer-path",
        )
    if own is None or own.read_bytes() == targets.read_bytes():
        return ok(about, "the target's")
    return error(
        about,
        "the drafter brings a tokenizer.json that differs from the target's",
        expected="one tokenizer: drafted ids are the target's ids",
        remedy="use the drafter that was trained for this target",
    )


def _mask_token_name(drafter: DrafterConfig, target_files: ModelFiles) -> Finding:
    about, token = "mask token's name", drafter.mask_token_id
    tokenizer = target_files.json("tokenizer.json") or {}
    added = {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", [])}
    words = (tokenizer.get("model") or {}).get("vocab") or {}
    ordinary = [word for word, index in words.items() if index == token] if isinstance(words, dict) else []
    name = added.get(token) or next(iter(ordinary), None)
    if name is None:
        return ok(about, "an unused row of the embedding")
    if token in added and not any(word in name for word in _IN_TEXTS):
        return ok(about, name)
    return warn(
        about,
        f"mask_token_id {token} is {name!r} in the target's tokenizer",
        expected="a token that no text contains",
        remedy="check it against the drafter's training: a wrong mask token ruins acceptance",
    )


def _chat_template(target_files: ModelFiles) -> Finding:
    about = "chat template"
    path = target_files.path("chat_template.jinja")
    template = path.read_text() if path else (target_files.json("tokenizer_config.json") or {}).get("chat_template")
    if not template:
        return warn(
            about,
            "the target has none",
            expected="the template that the drafter was trained with",
            remedy="set --chat-template: drafters are trained on templated text, raw prompts draft worse",
        )
    if "enable_thinking" not in str(template):
        return ok(about, "no thinking switch")
    return ok(about, "switches thinking; ask for it as the drafter's card measured it (chat_template_kwargs)")
