"""Predictions beside a made-up server that really ran every width."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

import pytest

from sglang_dflash.bench.simulate.cells import Cell, Recording
from sglang_dflash.bench.simulate.predict import predict
from sglang_dflash.bench.simulate.recording import answers
from sglang_dflash.bench.step_log import Decode, Step
from sglang_dflash.errors import DFlashError
from tests.unit.bench.simulate.made_up import WIDTHS, Hazards, recording, serve

LENGTHS = [300] * 24


def independent(answer: int, distance: int) -> float:
    return 0.92 - 0.012 * distance


def two_kinds(answer: int, distance: int) -> float:
    return (0.97 if answer % 2 else 0.7) - 0.012 * distance


def recorded(steps: Sequence[Step], lengths: Sequence[int], users: int, seconds: float | None = None) -> Recording:
    found = answers(steps)
    in_order = [found[str(number)] for number in range(len(lengths))]
    for answer, tokens in zip(in_order, lengths, strict=True):
        answer.cut(tokens)
    return Recording("made up", list(steps), [Cell("all", users, [in_order], seconds, 0.0)], {})


def really(hazards: Hazards, users: int, width: int) -> float:
    return fmean(serve(hazards, LENGTHS, users, partial(int, width), seed)[1] for seed in range(6))


@pytest.mark.parametrize(("hazards", "tolerance"), [(independent, 0.03), (two_kinds, 0.06)])
@pytest.mark.parametrize("users", [3, 8])
def test_every_width_is_predicted_from_steps_of_random_widths(hazards: Hazards, tolerance: float, users: int):
    """The mean over three recordings: one of them has an error of some 2 % from chance alone."""
    recordings = [recorded(recording(hazards, LENGTHS, users, seed), LENGTHS, users) for seed in range(3)]
    predictions = [{p.arm: p for p in predict(each)} for each in recordings]
    predicted = {arm: fmean(p[arm].outcome.tokens_per_s for p in predictions) for arm in predictions[0]}
    for width in WIDTHS:
        arm = "ar" if width == 1 else f"dflash:{width}"
        assert predicted[arm] == pytest.approx(really(hazards, users, width), rel=tolerance), arm
        assert predictions[0][arm].outcome.mean_width == width
    assert predictions[0]["ar"].over_plain == 1
    # The policy itself is served: near the best width, and above it by no more than luck
    assert 0.9 < predicted.pop("adaptive:16") / max(predicted.values()) < 1.05


def test_one_widths_steps_are_refused():
    steps, _ = serve(independent, LENGTHS, 2, lambda: 8, 0)
    with pytest.raises(DFlashError, match=r"widths \[8\].*drawn at random"):
        list(predict(recorded(steps, LENGTHS, 2)))


def test_plain_decoding_has_to_be_among_the_widths():
    steps = [step for step in recording(independent, LENGTHS, 2) if not (isinstance(step, Decode) and step.width == 1)]
    found = Recording("made up", steps, [], {})
    with pytest.raises(DFlashError, match="1 among them"):
        list(predict(found))


def test_what_no_log_shows_is_fitted_to_the_recordings_own_time():
    """Between an answer and the next question the user takes 30 ms here, as long as two or three steps."""
    few = LENGTHS[:16]
    steps = recording(independent, few, 1)
    log_s = (steps[-1].at + 0.01) - steps[0].at
    outside_s = 0.03 * (len(few) - 1)
    with_pauses = recorded(steps, few, 1, log_s + outside_s)
    (plain, *_) = predict(with_pauses)
    tokens = sum(1 + tokens for tokens in few)
    expected = tokens / (tokens / really(independent, 1, 1) + outside_s)
    assert plain.outcome.tokens_per_s == pytest.approx(expected, rel=0.01)
