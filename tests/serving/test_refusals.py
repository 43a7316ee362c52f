"""A pair that cannot work ends the server's process: a status that says so, one error, nothing left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.broken_pairs import BROKEN, write_pair
from tests.support.servers import run_to_exit

pytestmark = pytest.mark.engine

CASES = {broken.name: broken for broken in BROKEN}


# Every other broken pair is refused by the same call, without a process: tests/check/test_broken_pairs.py.
@pytest.mark.parametrize(
    "name", ['drafter mask_token_id "<|MASK|>"', pytest.param("two block sizes", marks=pytest.mark.slow)]
)
def test_the_process_ends_with_the_error(name: str, tmp_path: Path) -> None:
    write_pair(tmp_path, CASES[name])
    status, printed = run_to_exit(
        "--model-path",
        str(tmp_path / "target"),
        "--speculative-algorithm",
        "DFLASH",
        "--speculative-draft-model-path",
        str(tmp_path / "drafter"),
        *CASES[name].flags,
        timeout=120,
    )
    assert status not in (0, None)
    assert printed.count("sglang_dflash.errors.DFlashError: ") == 1
    assert CASES[name].names in printed
    assert "Load weight" not in printed
