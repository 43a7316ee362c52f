"""The version begins with the SGLang release that the package is for, and every place that names it agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sglang_dflash import __version__
from sglang_dflash.check.doctor import TESTED
from sglang_dflash.upstream import TESTED_SGLANG

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def text(file: str) -> str:
    return (ROOT / file).read_text()


def test_a_version_is_sglangs_and_a_count_of_ours() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\.[1-9]\d*(rc\d+|\.dev\d+)?", __version__)
    assert __version__.startswith(f"{TESTED_SGLANG}.")
    assert "version" in PROJECT["dynamic"]


def test_the_three_distributions_have_one_version_and_need_it() -> None:
    for folder in ("cpu_platform", "lab"):
        settings = tomllib.loads(text(f"{folder}/pyproject.toml"))
        project = settings["project"]
        assert settings["tool"]["distutils"] == tomllib.loads(text("pyproject.toml"))["tool"]["distutils"]
        assert project["version"] == __version__
        assert f"sglang-dflash=={__version__}" in project["dependencies"]
        assert project["requires-python"] == PROJECT["requires-python"]
        assert text(f"{folder}/LICENSE") == text("LICENSE")
    assert PROJECT["optional-dependencies"]["lab"] == [f"sglang-dflash-lab=={__version__}"]


@pytest.mark.parametrize(
    "file, line",
    [
        ("Makefile", "SGLANG_TESTED := sglang=={sglang}\n"),
        ("tools/wheels.txt", "\nsglang=={sglang} "),
        ("README.md", "**stock, released SGLang {sglang}**"),
        ("docs/compatibility.md", "\n| {ours} | {sglang}; "),
        ("docs/results/drift.md", "\n| {sglang} | 0 |"),
        ("patches/register-plugin.patch", "SGLang {sglang}\n"),
        ("CHANGELOG.md", "\n## [{ours}]"),
        ("containers/Dockerfile", "ARG SGLANG_IMAGE=lmsysorg/sglang:v{sglang}\n"),
        ("pyproject.toml", '"sglang=={sglang}"'),
    ],
)
def test_every_place_names_this_release(file: str, line: str) -> None:
    assert line.format(sglang=TESTED_SGLANG, ours=__version__) in text(file)


def test_the_doctors_tested_versions_are_those_of_make_setup_and_of_the_workflow() -> None:
    pins = f"{text('Makefile')}\n{text('requirements/cpu.txt')}"
    pinned = dict(re.findall(r"^(?:\w+ [:?]= )?(sglang|torch|triton)==(\S+)", pins, re.MULTILINE))
    assert {name.lower(): versions[0] for name, versions in TESTED.items()} == pinned
    assert f"TORCH: torch=={TESTED['torch'][1]} " in text(".github/workflows/test.yml")


def test_declared_pythons_are_those_of_the_page_and_of_ci() -> None:
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={declared[0]},<3.{int(declared[-1][2:]) + 1}"
    assert re.findall(r'"(3\.\d+)"', text(".github/workflows/test.yml")) == declared
    [row] = re.findall(rf"^\| {re.escape(__version__)} \|.*$", text("docs/compatibility.md"), re.MULTILINE)
    assert re.findall(r"\b3\.\d+", row) == declared
    assert all(version in row for version in TESTED["torch"])
