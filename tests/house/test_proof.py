"""``make proof`` repeats what failed and what a changed file concerns, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.matrix import Record
from tools import proof
from tools.proof import Run, runs


def test_a_run_is_repeated_once_a_file_that_it_depends_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "CACHE", tmp_path)
    run, key = Run("a", "echo 1 passed"), "before"
    monkeypatch.setattr(Record, "key", property(lambda _: key))
    assert run.result is None and "not run" in proof.table([run])
    result = proof.finish(run)
    assert run.result == result and (result["code"], result["last"]) == (0, "1 passed")
    assert "1 passed" in proof.table([run])
    key = "after"
    assert run.result is None


def test_a_failed_run_says_so_and_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "CACHE", tmp_path)
    monkeypatch.setattr(proof, "runs", lambda: [Run("a", f"echo ran >> {tmp_path}/ran; exit 3")])
    for count in (1, 2):
        with pytest.raises(SystemExit) as ended:
            proof.main(None)
        assert ended.value.code == 1 and (tmp_path / "ran").read_text() == "ran\n" * count
    monkeypatch.setattr(proof, "runs", lambda: [Run("a", "true")])
    with pytest.raises(SystemExit) as ended:
        proof.main(["other"])
    assert not ended.value.code


def test_every_make_target_that_tests_is_a_run() -> None:
    makefile = (Path(proof.__file__).parents[1] / "Makefile").read_text()
    commands = " ".join(run.command for run in runs())
    for target in makefile.partition(".PHONY:")[2].partition("\n")[0].split():
        if (
            target.startswith("test")
            and target not in ("test-gpu",)
            or target in ("soak", "fuzz", "mutants", "rehearse")
        ):
            assert f"make {target}" in commands, target
    names = [run.name for run in runs()]
    assert len(names) == len(set(names))
