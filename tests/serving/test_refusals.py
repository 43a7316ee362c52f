"""A launch that cannot work ends the process before it loads weights, with one error that names the fault and a fix.

All errors, without a process: tests/cpu, tests/plan, tests/states.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.broken_pairs import BROKEN, write_pair
from tests.support.preloaded import run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_process_with_a_broken_pair_ends_with_one_error_before_it_loads_weights(tmp_path: Path) -> None:
    (broken,) = (pair for pair in BROKEN if pair.name == 'drafter mask_token_id "<|MASK|>"')
    write_pair(tmp_path, broken)
    pair = ("--model-path", str(tmp_path / "target"), "--speculative-draft-model-path", str(tmp_path / "drafter"))
    ended = run("-m", "sglang.launch_server", *pair, "--speculative-algorithm", "DFLASH", timeout=120)
    printed = ended.stdout + ended.stderr
    assert ended.returncode
    (error,) = {line.partition("sglang-dflash:")[2] for line in printed.splitlines() if "sglang-dflash:" in line}
    for words in (broken.names, "Expected:", "Fix:"):
        assert words in error
    assert "Load weight" not in printed
