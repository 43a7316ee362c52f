"""A drafter that brings its own embedding and LM head: they must be the target's, as ours drafts with the target's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_dflash.check.findings import Finding, judge
from sglang_dflash.drafter.config import DrafterConfig, text_config
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.tensors import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from sglang_dflash.errors import DFlashError, Doubt

if TYPE_CHECKING:
    from torch import Tensor

    from sglang_dflash.drafter.stored import StoredTensors

SAMPLE = 64  # rows of each table that are compared


def check_vocabulary(drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles) -> Iterator[Finding]:
    """Findings on a drafter's own vocabulary; none if it has none."""
    if drafter.copies_vocabulary:
        yield judge("drafter's vocabulary", _vocabulary, drafter, drafter_files, target_files)


def _vocabulary(drafter: DrafterConfig, drafter_files: ModelFiles, target_files: ModelFiles) -> str:
    from sglang_dflash.drafter.stored import StoredTensors  # takes torch, which most checks do without

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
