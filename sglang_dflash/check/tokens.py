"""Tokenizer, mask token, chat template and a drafter's own vocabulary: a pair that disagrees on them drafts badly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sglang_dflash.check.findings import Finding, judge, of_error
from sglang_dflash.drafter.checkpoint import ModelFiles, StoredTensors
from sglang_dflash.drafter.config import DrafterConfig, text_config
from sglang_dflash.drafter.template import added_tokens, chat_template
from sglang_dflash.drafter.tensors import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from sglang_dflash.errors import DFlashError, Doubt

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = 64  # rows of each table that are compared
# Parts of added tokens that chats do contain.
_IN_TEXTS = ("im_start", "im_end", "endoftext", "think", "tool")


def check_tokens(
    drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles, given_template: str | None
) -> Iterator[Finding]:
    """Findings from the small files beside the two configurations.

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
        "the drafter brings a tokenizer.json that differs from the target's",
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
    return "switches thinking; ask for it as the drafter's card measured it (chat_template_kwargs)"


def _vocabulary(tokenizer: Mapping[str, Any]) -> Any:
    """The model's words: ids by word, or a list in the order of ids."""
    model = tokenizer.get("model")
    return (model.get("vocab") if isinstance(model, Mapping) else None) or {}


def check_vocabulary(drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles) -> Iterator[Finding]:
    """Findings on a drafter's own vocabulary; none if it has none."""
    if drafter.copies_vocabulary:
        yield judge("drafter's vocabulary", _own_vocabulary, drafter, drafter_files, target_files)


def _own_vocabulary(drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles) -> str:
    headers = drafter_files.tensors
    if headers and not any(name.endswith((EMBEDDING, HEAD)) for name in headers):
        return "the target's: the drafter holds no copy"
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
            "the drafter may hold an embedding and an LM head of its own; the weights to compare are not here yet",
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
        return range(drafter.draft_vocab_size)  # not here yet; nothing is compared then
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
    """``name`` if a sample of its rows, which are those of token ``ids``, is the target's; None if one is not here."""
    rows = sorted({round(i * (len(ids) - 1) / (SAMPLE - 1)) for i in range(SAMPLE)})
    mine, theirs = own.read(name, rows), target.read(source, [ids[row] for row in rows])
    if mine is None or theirs is None or not theirs.is_floating_point() or theirs.itemsize == 1:
        return None
    if _same(mine, theirs):
        return name
    raise DFlashError(
        f"the drafter's {name} is not the target's",
        expected="a copy: our worker drafts with the target's embedding and LM head",
        remedy="use the target that the drafter was trained for; a drafter with a trained vocabulary is not served",
    )


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and bool((mine == theirs.to(mine.dtype)).all())
