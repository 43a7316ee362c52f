"""Tokenizer, mask token and chat template: a pair that disagrees on them starts, and drafts badly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_dflash.check.findings import Doubt, Finding, judge
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.errors import DFlashError

# Parts of added tokens that chats do contain.
_IN_TEXTS = ("im_start", "im_end", "endoftext", "think", "tool")


def check_tokens(
    drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles, chat_template: str | None
) -> Iterator[Finding]:
    """Findings from the small files beside the two configurations.

    Args:
        chat_template: ``--chat-template``.
    """
    tokenizer = target_files.json("tokenizer.json")
    yield judge("tokenizer", _tokenizer, drafter_files.json("tokenizer.json"), tokenizer)
    yield judge("mask token's name", _mask_token_name, drafter.mask_token_id, tokenizer or {})
    yield judge("chat template", _chat_template, target_files, chat_template)


def _tokenizer(drafters: Mapping[str, Any] | None, targets: Mapping[str, Any] | None) -> str:
    if targets is None:
        raise Doubt(
            "the target has no tokenizer.json",
            expected="the tokenizer that the drafter was trained with",
            remedy="check --tokenizer-path",
        )
    if drafters is None or (_added(drafters), _vocabulary(drafters)) == (_added(targets), _vocabulary(targets)):
        return "the target's"
    raise DFlashError(
        "the drafter brings a tokenizer.json that differs from the target's",
        expected="one tokenizer: drafted ids are the target's ids",
        remedy="use the drafter that was trained for this target",
    )


def _mask_token_name(token: int, tokenizer: Mapping[str, Any]) -> str:
    added, words = _added(tokenizer), _vocabulary(tokenizer)
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
    path = target_files.path("chat_template.jinja")
    template = path.read_text() if path else (target_files.json("tokenizer_config.json") or {}).get("chat_template")
    if not template:
        raise Doubt(
            "the target has none",
            expected="the template that the drafter was trained with",
            remedy="set --chat-template: drafters are trained on templated text, raw prompts draft worse",
        )
    if "enable_thinking" not in str(template):
        return "no thinking switch"
    return "switches thinking; ask for it as the drafter's card measured it (chat_template_kwargs)"


def _added(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Added tokens of a ``tokenizer.json`` by id."""
    return {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", [])}


def _vocabulary(tokenizer: Mapping[str, Any]) -> Any:
    """The model's words: ids by word, or a list in the order of ids."""
    return (tokenizer.get("model") or {}).get("vocab") or {}
