"""The figure of what our worker's steps were like over time, from the step logs of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from sglang_dflash.bench import step_log
from sglang_dflash.bench.plots import STYLE, color
from sglang_dflash.bench.step_log import Decode
from sglang_dflash.bench.summary import Summary

_BINS = 120
_IDLE_S = 1.0
_PANELS = ("block width", "accept length", "tok/s")


@dataclass(frozen=True)
class Course:
    """An arm's decode steps, averaged over equal spans of the time in which its servers worked.

    Attributes:
        seconds: the middle of each span that had a step, since the first step.
        width, accept_length, tokens_per_s: per span: mean over steps; accepted drafts + bonus per block; the same per
            second, what stands behind an answer's end included.
    """

    seconds: np.ndarray
    width: np.ndarray
    accept_length: np.ndarray
    tokens_per_s: np.ndarray


def step_plots(summary: Summary, folder: Path) -> Iterator[tuple[str, str, Figure]]:
    """File name, caption and figure; none without a step log."""
    courses = {mode: found for mode in summary.modes if (found := course(step_log.logs(folder, mode))) is not None}
    if courses:
        caption = (
            "Every arm's steps over the time in which its server worked, pauses left out: mean block width, "
            "accepted drafts + bonus per block, committed tokens per second"
        )
        with plt.rc_context(STYLE):
            figure = over_time(summary, courses)
            yield "steps_over_time", caption, figure
            plt.close(figure)


def course(logs: list[Path]) -> Course | None:
    """The steps of an arm's servers, one after the other; None if there are none."""
    ends, widths, blocks, tokens = [], [], [], []
    now = 0.0
    for path in logs:
        for step, following in pairwise(step_log.read(path)):
            now += min(following.at - step.at, _IDLE_S)
            if isinstance(step, Decode):
                ends.append(now)
                widths.append(step.width)
                blocks.append(len(step.accept))
                tokens.append(sum(step.accept))
    if not ends:
        return None
    span = now / _BINS
    index = np.minimum(np.array(ends) / span, _BINS - 1).astype(int)
    steps, width, block, token = (
        np.bincount(index, values, minlength=_BINS) for values in (np.ones(len(ends)), widths, blocks, tokens)
    )
    some = steps > 0
    middle = (np.arange(_BINS) + 0.5) * span
    return Course(middle[some], (width / steps.clip(1))[some], (token / block.clip(1))[some], token[some] / span)


def over_time(summary: Summary, courses: dict[str, Course]) -> Figure:
    figure, grid = plt.subplots(len(_PANELS), 1, figsize=(9, 6), sharex=True, layout="constrained")
    for mode, steps in courses.items():
        values = (steps.width, steps.accept_length, steps.tokens_per_s)
        for axes, value in zip(grid, values, strict=True):
            axes.plot(steps.seconds, value, lw=1, color=color(summary, mode), label=mode)
    for axes, panel in zip(grid, _PANELS, strict=True):
        axes.set_ylabel(panel)
        axes.set_ylim(bottom=0)
    grid[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    grid[-1].set_xlabel("seconds of work")
    return figure
