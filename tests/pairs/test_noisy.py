"""The noisy drafter: the good one's weights with the noise of its recipe, made once, the same bytes every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from sglang_dflash.bench.known_pairs import find_pair
from sglang_dflash.cli import app
from sglang_dflash.errors import DFlashError
from sglang_dflash.pairs import NAMES, drafter_path, noisy, target_path
from sglang_dflash.pairs.noisy import SEED, SIGMA
from sglang_dflash.train.drafter import Drafter

run = CliRunner().invoke


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


def test_it_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(noisy, "_make", lambda good, folder: (made.append(folder), folder.mkdir(parents=True)))
    assert [drafter_path("tiny-hybrid", "noisy") for _ in range(2)] == made * 2


@pytest.mark.parametrize("name", NAMES)
def test_matrices_get_noise_in_the_modules_order_and_norms_none(name: str) -> None:
    expected = Drafter.load(drafter_path(name))
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in expected.parameters():
            if weight.dim() == 2:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * SIGMA)
    good, made = (load_file(drafter_path(name, kind) / "model.safetensors") for kind in ("good", "noisy"))
    assert made.keys() == expected.state_dict().keys()
    for key, weight in expected.state_dict().items():
        assert torch.equal(made[key], weight.bfloat16()), key
        assert torch.equal(made[key], good[key]) == (weight.dim() == 1), key


def test_two_processes_may_make_it_at_once(cache: Path) -> None:
    program = "from sglang_dflash.pairs import drafter_path; print(drafter_path('tiny-dense', 'noisy'))"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert printed == {str(drafter_path("tiny-dense", "noisy"))}


def test_another_process_that_was_first_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def late(unfinished: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"the other's")
        rename(unfinished, folder)

    monkeypatch.setattr(Path, "rename", late)
    folder = drafter_path("tiny-hybrid", "noisy")
    assert (folder / "model.safetensors").read_bytes() == b"the other's"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.raises(DFlashError, match="set XDG_CACHE_HOME"):
        drafter_path("tiny-hybrid", "noisy")


def test_check_finds_that_it_fits() -> None:
    result = run(app, ["check", str(target_path("tiny-hybrid")), str(drafter_path("tiny-hybrid", "noisy"))])
    assert result.exit_code == 0
    assert "25, as config.json describes them" in result.output


def test_commands_take_it_where_they_take_a_drafter() -> None:
    for name in NAMES:
        assert run(app, ["pairs", "path", name, "--drafter", "noisy"]).output == f"{drafter_path(name, 'noisy')}\n"
        assert find_pair(name, None, None, "noisy").drafter == str(drafter_path(name, "noisy"))


@pytest.mark.parametrize(
    "words",
    [
        ("train", "tiny-hybrid", "--out", "o", "--work", "w", "--drafter", "noisy"),
        ("measure", "tiny-hybrid", "--drafter", "noisy", "--save"),
    ],
)
def test_what_is_not_shipped_is_neither_trained_nor_given_a_provenance(words: tuple[str, ...]) -> None:
    result = run(app, ["pairs", *words])
    assert result.exit_code == 2
    assert "drafter of tiny-hybrid 'noisy'" in result.stderr
