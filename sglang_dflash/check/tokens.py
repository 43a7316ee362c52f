"""Tokenizer, mask token and chat template: a pair that disagrees on them starts, and drafts badly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_dflash.check.findings import Finding, judge, of_error
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.reading import read_text
from sglang_dflash.errors import DFlashError, Doubt

# Parts of added tokens that chats do contain.
_IN_TEXTS = ("im_start", "im_end", "endoftext", "think", "tool")


def check_tokens(
    drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles, chat_template: str | None
) -> Iterator[Finding]:
    """Findings from the small files beside the two configurations.

    Args:
        chat_template: ``--chat-template``.
    """
    try:
        tokenizer = target_files.json("tokenizer.json")
    except DFlashError as raised:
        yield of_error("tokenizer", raised)
        return
    yield judge("tokenizer", _tokenizer, drafter_files, tokenizer)
    yield judge("mask token's name", _mask_token_name, drafter.mask_token_id, tokenizer or {})
    yield judge("chat template", _chat_template, target_files, chat_template)


def _tokenizer(drafter_files: ModelFiles, targets: Mapping[str, Any] | None) -> str:
    drafters = drafter_files.json("tokenizer.json")
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
    template = read_text(path) if path else (target_files.json("tokenizer_config.json") or {}).get("chat_template")
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
    """Added tokens of a ``tokenizer.json`` by id.

    Raises:
        DFlashError: an entry is not one.
    """
    added: dict[int, str] = {}
    entries = tokenizer.get("added_tokens", [])
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case {"id": int(index), "content": str(content)}:
                added[index] = content
            case _:
                raise DFlashError(
                    f"added_tokens of a tokenizer.json holds {entry!r}",
                    expected="an id and a content in each entry",
                    remedy="download the model again",
                )
    return added


def _vocabulary(tokenizer: Mapping[str, Any]) -> Any:
    """The model's words: ids by word, or a list in the order of ids."""
    model = tokenizer.get("model")
    return (model.get("vocab") if isinstance(model, Mapping) else None) or {}
