"""Mode ``copy_rule``: another rule for taking copies, from ``copy_rule.json`` in the folder, to compare with ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", ".")) / "copy_rule.json"
_rule: dict[str, Any] = {}


def change() -> None:
    """Shortest match, and the margin below which a copy is taken."""
    from sglang_dflash.worker import copies

    _rule.update(json.loads(FILE.read_text()))
    copies.UNSURE, copies.LEAST = _rule["unsure"], _rule["least"]


def tell_probabilities(original: Callable[..., Any], vocabulary: Any, hidden: Any, **asked: Any) -> Any:
    """Around ``TargetVocabulary.argmax_token``: the drafts' probabilities in place of margins, if asked for."""
    tokens, margins = original(vocabulary, hidden, **asked)
    if margins is None or not _rule["probability"]:
        return tokens, margins
    return tokens, vocabulary._shard_logits(hidden).float().softmax(-1).amax(-1)
