"""The patch series does what the hooks do, applies to the installed SGLang, and comes out again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broken_pairs import BROKEN, write_pair
from tests.support.patched import apply, copy_of_sglang, series, touched, without_plugins

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")

HOOKS = """
from sglang_dflash import cpu
cpu.install = lambda: None
import sglang.srt.managers.scheduler
from sglang_dflash.plugin import register
register()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.arg_groups import resolution_hooks
print(*HookRegistry._hooks, sep="\\n")
# The patched tree is for machines with an accelerator: the CPU platform stays a plugin.
steps = resolution_hooks._HOOKS.items()
others = [name for name, hooks in steps if not all(h.__module__.endswith("cpu.platform") for h in hooks)]
print(*(f"resolution step {name}" for name in others), sep="\\n")
"""


@pytest.fixture()
def tree(tmp_path: Path) -> Path:
    return copy_of_sglang(tmp_path)


def contents(tree: Path) -> dict[str, str]:
    return {touched(patch): (tree / touched(patch)).read_text() for patch in series()}


def test_every_patch_says_why_and_changes_one_file_of_its_own() -> None:
    files = [touched(patch) for patch in series()]
    assert len(set(files)) == len(files) > 0
    for patch in series():
        header = patch.read_text().partition("\n--- ")[0]
        for word in ("Why: ", "Replaces hook: ", "Upstreamable: "):
            assert f"\n{word}" in header, patch.name


def test_every_hook_has_its_patch() -> None:
    done = subprocess.run([sys.executable, "-c", HOOKS], capture_output=True, text=True, check=True)
    hooks = set(done.stdout.split("\n")) - {""}
    assert len(hooks) > 5
    texts = "".join(patch.read_text() for patch in series())
    assert hooks <= set(re.findall(r"^Replaces hook: (.*)$", texts, flags=re.MULTILINE))


def test_the_series_applies_and_comes_out_again(tree: Path) -> None:
    before = contents(tree)
    assert apply("--check", str(tree)).returncode == 0
    assert contents(tree) == before
    assert apply(str(tree)).returncode == 0
    assert all("sglang_dflash" in text for text in contents(tree).values())
    again = apply(str(tree))
    assert again.returncode == 1
    assert "does not fit" in again.stderr
    assert apply("--reverse", str(tree)).returncode == 0
    assert contents(tree) == before


def test_none_applies_where_one_does_not(tree: Path) -> None:
    (tree / touched(series()[-1])).write_text("# another version\n")
    before = contents(tree)
    assert apply(str(tree)).returncode == 1
    assert contents(tree) == before


@pytest.mark.parametrize("arguments", [(), ("/nowhere",), ("--force", "/nowhere")])
def test_a_wrong_call_is_refused(arguments: tuple[str, ...]) -> None:
    assert apply(*arguments).returncode == 2


@pytest.mark.slow
def test_patched_and_without_plugins_it_reads_old_flags_and_refuses_a_broken_pair(tree: Path, tmp_path: Path) -> None:
    broken = next(broken for broken in BROKEN if broken.name == "old window under the block")
    write_pair(tmp_path / "pair", broken)
    pair = ("--model-path", str(tmp_path / "pair" / "target"), "--speculative-draft-model-path")
    command = [*pair, str(tmp_path / "pair" / "drafter"), "--speculative-algorithm", "DFLASH", *broken.flags]
    assert apply(str(tree)).returncode == 0
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "check" / "refuse_pairs.py")],
        input=json.dumps([command]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **without_plugins(tree)},
    )
    assert done.returncode == 0, done.stderr
    assert broken.names in json.loads(done.stdout)[0]
