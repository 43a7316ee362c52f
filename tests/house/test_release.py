"""The version begins with the SGLang release that the package is for, and every place that names it agrees.

And the GitHub workflows: every action pinned to a commit, least permissions, and only commands that exist.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")


def parsed(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in parsed(path)["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_at_most_and_pins_its_actions(path: Path) -> None:
    assert parsed(path)["permissions"] in ({}, {"contents": "read"})
    uses = [step for step in steps(path) if "uses" in step]
    assert uses and all(PINNED.fullmatch(step["uses"]) for step in uses)
    assert all(step["with"]["persist-credentials"] is False for step in uses if "checkout" in step["uses"])


def test_recipes_and_scripts_of_the_workflows_exist() -> None:
    script = "\n".join(step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "drift", "dist"} <= set(re.findall(r"\bmake ([\w-]+)", script)) <= targets
    paths = re.findall(r"\bbash (\S+)|-f (\S+)", script)
    assert len(paths) > 3 and all((ROOT / (first or second)).is_file() for first, second in paths)
