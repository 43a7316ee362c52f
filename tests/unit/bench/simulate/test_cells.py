"""A benchmark's folder, and a log by itself, as something to be replayed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.bench import results, step_log
from sglang_dflash.bench.simulate.cells import Measured, of_benchmark, of_log
from sglang_dflash.bench.step_log import Prefill, Step
from sglang_dflash.cli import app
from sglang_dflash.errors import DFlashError
from tests.unit.bench.records import provenance, request, run
from tests.unit.bench.simulate.made_up import PROMPT, recording, serve

LENGTHS = [120] * 12
RANDOM, PLAIN = "random:16", "ar"


def hazards(answer: int, distance: int) -> float:
    return 0.85


def line(step: Step) -> str:
    """A step as the worker writes it."""
    return json.dumps({"kind": "prefill" if isinstance(step, Prefill) else "decode", **vars(step)}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two users: an arm of random widths with its log, and plain decoding as the same server would have measured it."""
    results.append(tmp_path, "provenance", [provenance()])
    steps = recording(hazards, LENGTHS, 2)
    ((_, path),) = step_log.variable(tmp_path, RANDOM)
    # The warm-up is in the log too, under ids of the server's own
    warm_up = '{"at": 0, "kind": "prefill", "rids": ["f00"], "tokens": 9, "ms": null}\n'
    Path(path).write_text(warm_up + "".join(line(step) for step in steps))
    speeds = {RANDOM: steps[-1].at, PLAIN: sum(LENGTHS) / serve(hazards, LENGTHS, 2, lambda: 1, 0)[1]}
    for mode, wall_s in speeds.items():
        answered = [
            replace(
                request(mode=mode, concurrency=2, question=str(number), output_ids=(1,) * (1 + tokens)),
                start_s=number,
                rid=str(number),
            )
            for number, tokens in enumerate(LENGTHS)
        ]
        results.append_run(tmp_path, run(mode, concurrency=2, wall_s=wall_s), answered)
    return tmp_path


def test_a_cell_has_its_answers_as_the_client_saw_them(folder: Path):
    found = of_benchmark(folder)
    (cell,) = found.cells
    assert (cell.task, cell.concurrency, cell.in_vain) == ("math", 2, 0)
    (answers,) = cell.runs
    assert [len(answer.distance) for answer in answers] == LENGTHS
    assert [answer.rid for answer in answers] == [str(number) for number in range(len(LENGTHS))]
    assert {answer.prompt for answer in answers} == {PROMPT / 2, PROMPT}
    assert found.measured.keys() == {(PLAIN, "math", 2), (RANDOM, "math", 2)}


def test_predictions_stand_beside_what_the_same_benchmark_measured(folder: Path):
    outcome = CliRunner().invoke(app, ["bench", "simulate", str(folder), "--markdown"])
    assert outcome.exit_code == 0, outcome.output
    cells = [line.strip("| ").split(" | ") for line in outcome.output.splitlines() if line.startswith("| ")]
    ratios = {row[0]: row[-1] for row in cells[2:]}
    assert ratios.keys() == {"ar", "dflash:2", "dflash:4", "dflash:8", "dflash:16", "random:16", "adaptive:16"}
    assert float(ratios["ar"]) == pytest.approx(1, abs=0.05)
    assert float(ratios[RANDOM]) == pytest.approx(1, abs=0.05)
    assert ratios["dflash:8"] == "–"


def test_what_is_off_by_more_than_the_tolerance_is_marked(folder: Path):
    text = (folder / results.FILE_NAME).read_text().splitlines()
    slower = [row.replace('"wall_s": ', '"wall_s": 1') if '"mode": "ar"' in row else row for row in text]
    (folder / results.FILE_NAME).write_text("\n".join(slower) + "\n")
    outcome = CliRunner().invoke(app, ["bench", "simulate", str(folder), "--markdown"])
    assert [line for line in outcome.output.splitlines() if line.startswith("| ar ") and line.endswith("! |")]


def test_a_folder_without_random_widths_is_refused(tmp_path: Path):
    results.append(tmp_path, "provenance", [provenance()])
    results.append_run(tmp_path, run("dflash:16"), [request(mode="dflash:16")])
    with pytest.raises(DFlashError, match="has dflash:16.*an arm random:BLOCK"):
        of_benchmark(tmp_path)


def test_a_request_without_steps_is_named(folder: Path):
    (path,) = step_log.logs(folder, RANDOM)
    path.write_text(path.read_text().replace('"11"', '"12"'))
    with pytest.raises(DFlashError, match="no step of request 11 "):
        of_benchmark(folder)


def test_a_log_by_itself_is_one_cell(folder: Path, tmp_path: Path):
    (path,) = step_log.logs(folder, RANDOM)
    measured = tmp_path / "measured.json"
    measured.write_text('{"ar": 100.0}')
    found = of_log(path, measured=measured)
    (cell,) = found.cells
    assert (cell.task, cell.concurrency, cell.seconds) == ("all", 2, None)
    assert len(cell.runs[0]) == len(LENGTHS)
    assert found.measured == {("ar", "all", 2): Measured(100.0, pytest.approx(math.nan, nan_ok=True))}
    assert of_log(path, users=1).cells[0].concurrency == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "neither a recording nor --cards"),
        (["x", "--cards"], "both a recording and --cards"),
        (["--cards", "--concurrency", "2"], "without a step log"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], words: str):
    outcome = CliRunner().invoke(app, ["bench", "simulate", *options])
    assert outcome.exit_code != 0
    assert words in outcome.output
