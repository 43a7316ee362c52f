"""``make proof`` repeats what failed and what a changed file concerns, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.matrix import Record
from tools import proof
from tools.proof import Run, runs


def test_a_run_is_repeated_after_a_failure_and_once_a_file_that_it_depends_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = ("", 0, 0)
    monkeypatch.setattr(proof, "CACHE", tmp_path)
    monkeypatch.setattr(Record, "key", property(lambda _: now[0]))
    monkeypatch.setattr(proof, "runs", lambda: [Run("a", f"echo ran >> {tmp_path}/ran; exit {now[1]}")])
    for now in (("before", 3, 1), ("before", 0, 2), ("before", 0, 2), ("after", 0, 3)):
        with pytest.raises(SystemExit) as ended:
            proof.main(None)
        assert ended.value.code == bool(now[1]) and (tmp_path / "ran").read_text() == "ran\n" * now[2]


def test_every_make_target_that_tests_is_a_run() -> None:
    makefile = (Path(proof.__file__).parents[1] / "Makefile").read_text()
    commands = " ".join(run.command for run in runs())
    targets = makefile.partition(".PHONY:")[2].partition("\n")[0].split()
    tests = {target for target in targets if target.startswith("test")} - {"test-gpu"}
    for target in tests | {"soak", "fuzz", "mutants", "rehearse"}:
        assert f"make {target}" in commands, target
    names = [run.name for run in runs()]
    assert len(names) == len(set(names))
