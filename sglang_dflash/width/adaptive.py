"""Adaptive width: the most expected tokens per millisecond, for the current batch and traffic."""

from collections.abc import Sequence
from typing import Any

from sglang_dflash.width.costs import CostTable
from sglang_dflash.width.policy import BUCKET, BUCKETS, ExpectedGain, WidthPolicy
from sglang_dflash.width.survival import MATCHED_PRIOR, Survival

# switch at once for this gain, or once missed gains add up to this many steps
SWITCH_NOW, SWITCH_AFTER = 0.1, 0.3
PATIENCE = 32  # consecutive decisions for plain decoding that make a pause
SHARE, SAVED = 0.006, 3.0  # share of time that probes may lose; most steps that they may lose at once
MORE = 0.1  # extra loss, in steps, accepted for probing a wider width than the next one
RESERVE = 2.5  # steps of the budget, for probes after one that accepted more than expected
EVERY, EVERY_IF_BETTER = 8, 2  # steps between probes


class AdaptiveWidth(WidthPolicy):
    """Maximise expected tokens per millisecond; see ``docs/settings.md``.

    Args:
        costs: a table over the widths; plain decoding is a choice if 1 is among them.
        drafter_width: positions that the drafter drafts; wider widths are for copies.
    """

    def __init__(self, costs: CostTable, drafter_width: int | None = None) -> None:
        super().__init__(*costs.widths)
        self.costs = costs
        self._drafter_width = drafter_width = min(drafter_width or self.widths[-1], self.widths[-1])
        self.forget()
        self.can_pause = self.widths[0] == 1 and len(self.widths) > 1 and drafter_width > 1
        # without a match, widths beyond the drafter's block cannot help; one block is always allowed
        self._drafted_columns = max(min(2, drafter_width), sum(width <= drafter_width for width in self.widths))
        self.tokens_per_ms = self._missed_gains = 0.0
        self._budget = SAVED * costs.row(1)[0]  # milliseconds
        self._better = False  # whether the last probe accepted more than expected
        self._best = self._since_probe = self._probes = self._batch_size = self._plain_in_a_row = self._pauses = 0

    def width(self, batch_size: int, matches: Sequence[int] = ()) -> int:
        self._batch_size, matching = batch_size, any(matches[1:])
        row, tokens = self.costs.row(batch_size), self._tokens(matches)
        rates = [count / ms for count, ms in zip(tokens, row, strict=True)]
        self._decide(rates)
        self._count_pauses(matching)
        end = len(row) if matching else max(self._drafted_columns, self._best + 1)
        column = self._probe(row[:end], tokens[:end])
        self._probes += column != self._best
        self.tokens_per_ms = rates[column] * batch_size
        return self.widths[column]

    def expected_gain(self, *, alone: bool = False) -> ExpectedGain | None:
        if not self.can_pause:
            return None
        tokens, row = self._tokens(), self.costs.row(1 if alone else self._batch_size)
        best = max(range(1, self._drafted_columns), key=lambda column: tokens[column] / row[column])
        return ExpectedGain(self.widths[best], self.survival.hazards[1], tokens[best], row[best] / row[0])

    def observe(self, width: int, accept_lens: Sequence[int], buckets: Sequence[int] = ()) -> None:
        if width > self.widths[self._best]:
            requests = (self.by_bucket[bucket] for bucket in buckets or [0] * len(accept_lens))
            self._better = sum(accept_lens) > sum(each.tokens[min(width, each.max_width)] for each in requests)
        by_bucket: list[list[int]] = [[] for _ in range(BUCKETS)]
        for length, bucket in zip(accept_lens, buckets or [0] * len(accept_lens), strict=True):
            by_bucket[bucket].append(length)
        for survival, lengths in zip(self.by_bucket, by_bucket, strict=True):
            # clamp tokens past the drafter's block: copies of a match that the host had not read
            survival.observe(width, [min(length, survival.max_width) for length in lengths])

    def forget(self) -> None:
        # more tokens of copies are accepted than of drafts, and more with longer matches
        matched = (Survival(self.widths[-1], MATCHED_PRIOR) for _ in range(1, BUCKETS))
        self.survival = Survival(self._drafter_width)
        self.by_bucket, self.paused = [self.survival, *matched], None

    def observe_time(self, batch_size: int, width: int, milliseconds: float, at_most: bool = False) -> None:
        self.costs.observe(batch_size, width, milliseconds, at_most)

    def state_hash(self) -> int:
        # hashes of numbers are the same in every process
        survival = (tokens for each in self.by_bucket for tokens in each.tokens)
        return hash((self._best, self._missed_gains, self._since_probe, self._budget, *self.costs.row(1), *survival))

    def describe(self) -> dict[str, Any]:
        return {
            "policy": "adaptive",
            "widths": list(self.widths),
            "probes": self._probes,
            "paused": None if self.paused is None else str(self.paused),
            "pauses": self._pauses,
            "survival": self.survival.as_dict(),
            "survival_by_match_length": {
                str(bucket * BUCKET): self.by_bucket[bucket].as_dict() for bucket in range(1, BUCKETS)
            },
            "costs": self.costs.as_dict(),
        }

    def _tokens(self, matches: Sequence[int] = ()) -> list[float]:
        requests = [(n, survival) for n, survival in zip(matches, self.by_bucket, strict=False) if n]
        requests = requests or [(1, self.survival)]
        total, recent = sum(n for n, _ in requests), self.widths[self._best]
        by_width = zip(*(survival.tokens_if_always(self.widths, recent) for _, survival in requests), strict=True)
        return [sum(n * each for (n, _), each in zip(requests, found, strict=True)) / total for found in by_width]

    def _decide(self, rates: Sequence[float]) -> None:
        # a small gain must last, so that noise alone does not change the best width
        most = max(rates)
        gain = most / rates[self._best] - 1
        self._missed_gains = self._missed_gains + gain if gain > 0 else 0.0
        if gain > SWITCH_NOW or self._missed_gains > SWITCH_AFTER:
            self._best, self._missed_gains = rates.index(most), 0.0

    def _probe(self, row: Sequence[float], tokens: Sequence[float]) -> int:
        # A probe of a wider block costs the time that the best width would have needed for the same tokens.
        best = self._best
        step, rate = row[best], tokens[best] / row[best]
        self._budget = min(self._budget + SHARE * step, SAVED * step)
        self._since_probe += 1
        every, reserve = (EVERY_IF_BETTER, 0.0) if self._better else (EVERY, RESERVE * step)
        if best + 1 == len(row) or self._since_probe < every:
            return best
        losses = [ms - count / rate for ms, count in zip(row, tokens, strict=True)]
        most = max(losses[best + 1], 0.0) + MORE * step
        wider = max(column for column in range(best + 1, len(row)) if losses[column] <= most)
        if losses[wider] > self._budget - reserve:
            return best
        self._budget, self._since_probe = self._budget - max(losses[wider], 0.0), 0
        return wider

    def _count_pauses(self, matching: bool) -> None:
        if self.widths[self._best] > 1:
            if not matching:  # a block that was picked for its copies is no evidence for the drafter
                self._plain_in_a_row, self.paused = 0, None
            return
        self._plain_in_a_row += 1
        if self._plain_in_a_row == PATIENCE and self.can_pause:
            self.paused = self.expected_gain()
            self._pauses += 1
