"""What every ``/server_info`` starts from, in a process that has resolved arguments or received them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broken_pairs import Broken, write_pair

pytest.importorskip("sglang")

pytestmark = pytest.mark.sglang

# The later reports follow after width file and models are gone; the last is that of another process's copy.
REPORTS = """
import json, pickle, shutil, sys
from pathlib import Path
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
folder, *flags = sys.argv[1:]
load_plugins()
args = prepare_server_args(flags)
args.resolve_once()
reports = [args.resolved_dict()["speculative_adaptive"]]
shutil.rmtree(folder)
opened = []
sys.addaudithook(lambda event, values: opened.append(values[0]) if event == "open" else None)
reports += [copy.resolved_dict()["speculative_adaptive"] for copy in (args, pickle.loads(pickle.dumps(args)))]
print(json.dumps([reports, opened]))
"""


def test_whether_widths_are_adaptive_is_decided_at_launch_and_needs_no_file_later(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_pair(folder, Broken("fits", ""))
    (folder / "widths.json").write_text('{"widths": [1, 2, 4]}')
    flags = ("--model-path", "target", "--speculative-draft-model-path", "drafter", "--speculative-algorithm", "DFLASH")
    flags += ("--speculative-adaptive", "--speculative-adaptive-config", "widths.json")
    flags = tuple(str(folder / flag) if (folder / flag).exists() else flag for flag in flags)
    ran = subprocess.run(
        [sys.executable, "-c", REPORTS, str(folder), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [[True] * 3, []]
