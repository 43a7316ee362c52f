"""The GitHub workflows: every action pinned to a commit, least permissions, and only commands that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
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
