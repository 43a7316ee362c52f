"""Logs of steps: where an arm's are, and what a line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.bench import step_log
from sglang_dflash.bench.step_log import Decode, Prefill
from sglang_dflash.errors import DFlashError

PREFILL = '{"at": 0.5, "kind": "prefill", "rids": ["a", "b"], "tokens": 40, "ms": null}\n'
DECODE = (
    '{"at": 0.6, "kind": "decode", "rids": ["a", "b"], "width": 4, "verify": null, "accept": [4, 1], '
    '"context": 42, "ms": 9.5}\n'
)


def test_every_start_of_a_server_has_a_log_of_its_own(tmp_path: Path):
    starts = []
    for _ in range(11):
        ((name, path),) = step_log.variable(tmp_path, "adaptive:16+A=1")
        assert name == "SGLANG_DFLASH_STEP_LOG"
        Path(path).touch()
        starts.append(Path(path))
    assert step_log.logs(tmp_path, "adaptive:16+A=1") == starts
    assert len(set(starts)) == 11
    assert step_log.logs(tmp_path, "adaptive:16") == []


def test_a_log_is_read_as_steps(tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    path.write_text(PREFILL + DECODE + DECODE.replace("null", "[4, 2]") + DECODE[:30])
    prefill, whole, cut = step_log.read(path)
    assert prefill == Prefill(0.5, ("a", "b"), 40, None)
    assert whole == Decode(0.6, ("a", "b"), 4, (4, 4), (4, 1), 42, 9.5)
    assert isinstance(cut, Decode)
    assert cut.verify == (4, 2)


@pytest.mark.parametrize("line", ["{\n", "{}\n", DECODE.replace("[4, 1]", "[4]")])
def test_a_line_that_is_no_step_is_named(line: str, tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    path.write_text(PREFILL + line)
    with pytest.raises(DFlashError, match="line 2 of"):
        step_log.read(path)


def test_a_missing_log_is_named(tmp_path: Path):
    with pytest.raises(DFlashError, match="no step log"):
        step_log.read(tmp_path / "steps.jsonl")
