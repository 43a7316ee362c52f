"""Stored accept lengths of the shipped pairs, per drafter and width: the gate on *acceptance*.

A drafter that reads a wrong position, or a stale key, changes no text, only speed. So every server test that compares
texts may also hold its counts to ``tests/fixtures/acceptance.json``: of each prompt the number of steps and of accepted
drafts, greedy, in float32. They are whole numbers and must be equal.

The figures were computed by the reference decoder (``python -m tests.support.acceptance``) and are not computed again:
a change of the worker, of the reference, of the weights or of SGLang that moves one fails. Is the move intended, as by
new weights, run the command and commit the file with the reason. A prompt on which some choice is closer than ``LEAD``
has no figure for that drafter and width: another processor may round it the other way.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_dflash_lab.pairs import NAMES, drafter_kinds, drafter_path, target_path
from sglang_dflash_lab.train.reference_decoder import Decoded, ReferenceDecoder
from tests.support.generation import Answer
from tests.support.prompts import corpus

FIGURES = Path(__file__).parents[1] / "fixtures" / "acceptance.json"
WIDTHS = (2, 4, 8, 16)
PROMPTS = 16
NEW_TOKENS = 64
# Logits of two float32 implementations differ by less than 1e-4 here.
LEAD = 1e-3

Counts = tuple[int, int]  # steps, accepted drafts


def stored(pair: str, drafter: str, width: int) -> list[Counts | None]:
    """Of each of the first ``PROMPTS`` prompts of :func:`~tests.support.prompts.corpus`; None: too close to store."""
    figures: dict[str, list[list[int] | None]] = json.loads(FIGURES.read_text())
    return [(row[0], row[1]) if row else None for row in figures[f"{pair} {drafter} {width}"]]


def assert_as_stored(answers: Sequence[Answer], pair: str, drafter: str, width: int) -> None:
    """The counts of the first prompts' answers are the stored ones.

    Raises:
        AssertionError: naming every prompt whose counts differ, and both accept lengths.
    """
    found = [(answer.meta["spec_verify_ct"], answer.meta["spec_num_correct_drafts"]) for answer in answers]
    asked = zip(range(len(found)), found, stored(pair, drafter, width), strict=False)
    pairs = [(i, mine, wanted) for i, mine, wanted in asked if wanted]
    moved = [f"prompt {i}: {mine} for {wanted}" for i, mine, wanted in pairs if mine != wanted]
    lengths = " for ".join(f"{accept_length([p[k] for p in pairs]):.3f}" for k in (1, 2))
    assert not moved, (
        f"{pair} {drafter} {width}: accept length {lengths} as stored; (steps, accepted drafts) of "
        f"{len(moved)} of {len(pairs)} prompts moved, {'; '.join(moved)}"
    )


def accept_length(counts: Sequence[Counts]) -> float:
    """Tokens a step: every step adds one of the target's own to the accepted drafts."""
    return 1 + sum(accepted for _, accepted in counts) / sum(steps for steps, _ in counts)


def counts_of(decoded: Decoded) -> Counts | None:
    steps = decoded.steps
    if min(step.lead for step in steps) < LEAD:
        return None
    return len(steps), sum(decoded.accept_lengths) - len(steps)


def main() -> None:
    ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    lines = []
    for pair in NAMES:
        for drafter in drafter_kinds(pair):
            decoder = ReferenceDecoder.load(target_path(pair), drafter_path(pair, drafter))
            for width in WIDTHS:
                decoded = [decoder.decode(prompt, NEW_TOKENS, width) for prompt in corpus(pair, PROMPTS)]
                counts = [counts_of(each) for each in decoded]
                lines.append(f"{json.dumps(f'{pair} {drafter} {width}')}: {json.dumps(counts)}")
                kept = [each for each in counts if each]
                print(f"{lines[-1]}\n  accept length {accept_length(kept):.2f}, {PROMPTS - len(kept)} too close")
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
