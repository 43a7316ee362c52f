"""A few inputs of every part of ``python -m tests.fuzz``, without its limit on memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import checkpoints, drafters, embeddings, flags
from tests.fuzz.part import run

SHARE = 0.03  # of a full run


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("module", [drafters, checkpoints, flags, embeddings], ids=lambda module: module.__name__)
def test_no_finding(module: object, tmp_path: Path) -> None:
    outcomes = [run(part, int(SHARE * part.share)) for part in module.parts(tmp_path / "models")]  # type: ignore[attr-defined]
    assert not [f"{each.part.name}: {finding}" for each in outcomes for finding in each.judge.findings]
    # Some inputs are good, some bad: a part whose inputs all fall at the first fence tests nothing behind it.
    for each in outcomes:
        assert each.judge.inputs > 30 and each.judge.refused < each.judge.inputs, each.part.name
