"""The GitHub workflows: every action pinned to a commit, least permissions, and only commands that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_dflash.check.cli import SUMMARIES
from tools.dist import DISTRIBUTIONS

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def parsed(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in parsed(path)["jobs"].values():
        yield from job["steps"]


def test_the_workflows_are_test_drift_and_release() -> None:
    assert [path.stem for path in WORKFLOWS] == ["drift", "release", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_to_a_commit_with_its_version(path: Path) -> None:
    uses = [line.strip().removeprefix("- ") for line in path.read_text().splitlines() if "uses:" in line]
    assert len(uses) == sum("uses" in step for step in steps(path)) > 0
    assert [line for line in uses if not PINNED.fullmatch(line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_at_most_and_a_job_names_what_it_writes(path: Path) -> None:
    assert parsed(path)["permissions"] in ({}, {"contents": "read"})
    assert all(job["timeout-minutes"] for job in parsed(path)["jobs"].values())
    checkouts = [step for step in steps(path) if "checkout" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_commands_scripts_and_recipes_of_the_workflows_exist() -> None:
    script = "\n".join(step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "drift", "dist"} <= set(re.findall(r"\bmake ([\w-]+)", script)) <= targets
    assert set(re.findall(r"\bsglang-dflash (\w+)", script)) <= set(SUMMARIES)
    paths = re.findall(r"\bbash (\S+)|-f (\S+)", script)
    assert len(paths) > 3 and all((ROOT / (first or second)).is_file() for first, second in paths)


def test_the_workflows_and_the_cpu_image_test_with_the_torch_that_sglang_requires() -> None:
    [required] = [pin for pin in requires("sglang") or () if pin.startswith("torch==")]
    image = dict(re.findall(r"^ARG (\w+)=(.*)$", (ROOT / "containers/Dockerfile.cpu").read_text(), re.MULTILINE))
    pins = {path.stem: parsed(path)["env"].get("TORCH") for path in WORKFLOWS} | {"image": image["TORCH"]}
    assert pins == {"drift": None, "release": required, "test": required, "image": required}


def test_a_release_publishes_every_distribution() -> None:
    publish = parsed(ROOT / ".github/workflows/release.yml")["jobs"]["publish"]
    assert publish["strategy"]["matrix"]["project"] == [each.package for each in DISTRIBUTIONS]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
