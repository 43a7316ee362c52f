"""A target's chat template, and the token ids that identify it in a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.checkpoint import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, ModelFiles, read_text
from sglang_dflash.errors import DFlashError

_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class TemplateTokens:
    """Ids of added tokens in a chat template.

    Attributes:
        markers: a rendered prompt contains one of these near its beginning or end; empty if the template has none.
        think: tokens that open and close a model's thinking; None unless the template has both.
    """

    markers: frozenset[int] = frozenset()
    think: tuple[int, int] | None = None


def chat_template(files: ModelFiles) -> str | None:
    """Return the chat template in a model's files, None without one; errors as of :meth:`ModelFiles.json`."""
    path = files.path(TEMPLATE)
    template = read_text(path) if path else (files.json(TOKENIZER_CONFIG) or {}).get("chat_template")
    return str(template) if template else None


def added_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the added tokens of a ``tokenizer.json`` by id; an entry without id or content is a DFlashError."""
    try:
        return {int(entry["id"]): str(entry["content"]) for entry in tokenizer.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DFlashError(
            f"added_tokens of a tokenizer.json cannot be read ({error!r})",
            expected="an id and a content in each entry",
            remedy="download the model again",
        ) from None


def template_tokens(files: ModelFiles, given: str | None) -> TemplateTokens:
    """Read the tokens of a target's template; empty if a file is missing or the template is one of SGLang's.

    Args:
        files: the tokenizer's.
        given: ``--chat-template``, a file or a name; None for the tokenizer's template.
    """
    try:
        template = read_text(Path(given)) if given else chat_template(files)
        added = added_tokens(files.json(TOKENIZER) or {})
        first = (files.json(TOKENIZER_CONFIG) or {}).get("bos_token")
    except DFlashError:
        return TemplateTokens()
    ids = {content: index for index, content in added.items() if content in (template or "")}
    think = (ids[_THINK[0]], ids[_THINK[1]]) if ids.keys() >= set(_THINK) else None
    # Raw prompts also begin with the first token.
    others = {*_THINK, first.get("content") if isinstance(first, dict) else first}
    return TemplateTokens(frozenset(index for content, index in ids.items() if content not in others), think)
