"""The container recipes: clean by hadolint, of the tested SGLang and Python, and what they copy installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.upstream import TESTED_SGLANG

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "containers").glob("Dockerfile*"))
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_hadolint_is_clean(recipe: Path) -> None:
    linter = shutil.which("hadolint", path=f"{BIN}:{os.environ['PATH']}")
    assert linter, "run `make setup`"
    done = subprocess.run([linter, recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_gpu_image_is_of_the_tested_sglang_and_the_cpu_image_of_the_tested_python() -> None:
    gpu, cpu = (recipe.read_text() for recipe in RECIPES)
    assert f"ARG SGLANG_IMAGE=lmsysorg/sglang:v{TESTED_SGLANG}\n" in gpu
    [tested] = re.findall(r"(3\.\d+) tested;", (ROOT / "docs/compatibility.md").read_text())
    assert f"ARG PYTHON_VERSION={tested}\n" in cpu


def test_what_the_gpu_image_copies_installs_the_package_and_the_launch_scripts(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    for names, place in re.findall(r"^COPY (.+) (\S+)$", (ROOT / "containers/Dockerfile").read_text(), re.MULTILINE):
        for name in names.split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / place)
    (left := source / "build/lib/sglang_dflash").mkdir(parents=True)
    (left / "gone.py").touch()  # a module of an earlier build
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(tmp_path / "installed"), str(source)], check=True)
    assert (tmp_path / "installed/sglang_dflash/drafter/published.json").is_file()
    assert (tmp_path / "installed/share/sglang-dflash/launch/serve.sh").is_file()
    assert not (tmp_path / "installed/sglang_dflash/gone.py").exists()
