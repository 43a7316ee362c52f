"""What a step log says of every answer: which tokens were drafted, how far from their anchor, and with what success."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sglang_dflash.bench.step_log import Decode, Prefill, Step
from sglang_dflash.errors import DFlashError

_REMEDY = 'record with the arm random:BLOCK, or with {"policy": "random"} in --speculative-adaptive-config'
# A width drawn at random has a fair share of the steps; a policy's choices depend on the text they were made for.
_FAIR = 0.5


@dataclass
class Answer:
    """One recorded request. A token is one of its decode steps', so the prefill's is not among them.

    Attributes:
        prompt: tokens that its prefill computed.
        distance: of each token from its anchor, in drafted positions; 0 for a token that no step drafted.
        accepted: whether that draft stood.
        ends: tokens after each of its steps.
    """

    rid: str
    prompt: float = 0.0
    distance: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, accept: int, verify: int) -> None:
        """A step that verified ``verify`` positions, anchor included, and committed ``accept`` tokens."""
        self.distance += range(1, accept)
        self.accepted += [True] * (accept - 1)
        # The bonus token stands where a draft was rejected, or where there was none.
        self.distance.append(accept if accept < verify else 0)
        self.accepted.append(False)
        self.ends.append(len(self.distance))

    def cut(self, tokens: int) -> int:
        """Keep ``tokens``: the answer ended there. -> steps that were launched for it in vain, behind its end."""
        in_vain = sum(end >= tokens for end in self.ends) - 1
        if in_vain < 0:
            raise DFlashError(
                f"{len(self.distance)} logged tokens of request {self.rid}, which has {tokens}",
                expected="every step of an answer in the log",
                remedy="record again with a log of its own for every server",
            )
        del self.distance[tokens:], self.accepted[tokens:]
        return in_vain


def answers(steps: Iterable[Step]) -> dict[str, Answer]:
    """Every request of a log by its id, in the order of their prefills."""
    found: dict[str, Answer] = {}
    for step in steps:
        if isinstance(step, Prefill):
            for rid in step.rids:
                answer = found.setdefault(rid, Answer(rid))
                answer.prompt += step.tokens / len(step.rids)
        else:
            for rid, accept, verify in zip(step.rids, step.accept, step.verify, strict=True):
                if rid in found:
                    found[rid].add(accept, verify)
    return found


def check_widths(steps: Sequence[Step]) -> list[str]:
    """Refuse a recording of one width; -> warnings about one whose widths were not drawn evenly.

    A recording of width 8 says nothing of positions behind the eighth, and its steps begin where blocks of 8 happened
    to end. Predictions for other widths from it are biased.

    Raises:
        DFlashError: fewer than two widths.
    """
    widths = [step.width for step in steps if isinstance(step, Decode)]
    counts = {width: widths.count(width) for width in sorted(set(widths))}
    if len(counts) < 2:
        raise DFlashError(
            f"a recording of {len(widths)} decode steps with widths {list(counts)}",
            expected="several widths, drawn at random: from one width's steps the others' are mispredicted",
            remedy=_REMEDY,
        )
    rare = [width for width, number in counts.items() if number < _FAIR * len(widths) / len(counts)]
    if not rare:
        return []
    return [f"widths {rare} are rare among {counts}: not drawn evenly, so predictions are biased; {_REMEDY}"]
