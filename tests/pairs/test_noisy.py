"""The noisy drafter: the good one's weights with the noise of its recipe, made once, the same bytes every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash_lab.pairs import drafter_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_every_make_gives_the_same_bytes_in_the_same_place(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = drafter_path("tiny-hybrid", "noisy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))
    second = drafter_path("tiny-hybrid", "noisy")
    assert cache in first.parents and first.relative_to(cache) == second.relative_to(cache / "other")
    for name in ("model.safetensors", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert [entry for entry in first.parent.iterdir() if entry != first] == []


def test_two_processes_may_make_it_at_once(cache: Path) -> None:
    program = "from sglang_dflash_lab.pairs import drafter_path; print(drafter_path('tiny-dense', 'noisy'))"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert printed == {str(drafter_path("tiny-dense", "noisy"))}
