"""A model's chat template and added tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.checkpoint import TEMPLATE, TOKENIZER_CONFIG, ModelFiles, read_text
from sglang_dflash.errors import DFlashError


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
