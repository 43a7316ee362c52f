"""From flags to what the memory's division goes by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.cli import app
from sglang_dflash.errors import DFlashError, raise_first_error
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import GPUS
from sglang_dflash.plan.pools import Sizing, fit
from sglang_dflash.plan.report import preflight
from tests.support.cards import FOLDER

PAIR = {"target": str(FOLDER / "Qwen3.5-27B" / "target"), "drafter": str(FOLDER / "Qwen3.5-27B" / "drafter")}


def demand(*flags: str) -> Sizing:
    memory = preflight(parse(flags, **PAIR)[0], GPUS["h200"]).memory
    assert memory is not None
    return memory.served.sizing


def test_without_a_prefix_cache_there_is_a_state_for_each_request() -> None:
    alone = demand("--disable-radix-cache", "--max-running-requests", "9")
    assert (alone.slots_per_request, alone.max_states) == (1, 9)
    assert demand("--disable-radix-cache", "--max-mamba-cache-size", "20").max_states == 20
    assert demand("--max-running-requests", "9").max_states is None


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        (("--speculative-num-draft-tokens", "8"), 16),
        (("--speculative-num-draft-tokens", "8", "--linear-replayssm-cache-len", "32"), 32),
    ],
)
def test_a_ring_of_records_is_as_long_as_needed_or_asked_for(flags: tuple[str, ...], length: int) -> None:
    assert demand(*flags).replayed.records == length * demand().replayed.records // 16


def test_a_replay_keeps_float32_states_unless_a_flag_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
    by_environment, by_flag = demand(), demand("--mamba-ssm-dtype", "bfloat16")
    assert by_environment.replayed.slot - by_environment.kept.slot == 48 * 48 * 128 * 128 * 2
    assert by_flag.replayed.slot == by_flag.kept.slot == by_environment.kept.slot


def test_a_prefill_server_keeps_states_and_has_no_scratch() -> None:
    """It verifies nothing: what SGLang leaves out there is K/V and states."""
    flags = ("--mem-fraction-static", "0.75", "--disaggregation-mode", "prefill")
    report = preflight(parse(flags, **PAIR)[0], GPUS["h200"])
    assert report.plan is not None and report.plan.describe()["states"] == "kept" and report.memory is not None
    served, verifying = report.memory.served, demand(*flags[:2])
    assert report.memory.other is None
    assert served.bytes["scratch"] == 0 and served.tokens > 300_000
    assert served.running > fit(verifying, report.memory.static_bytes).running
    assert served.tokens >= fit(verifying, report.memory.static_bytes, replay=True).tokens
    assert demand(*flags, "--enable-pd-role-switch").kept.scratch  # it may become a decoding server


def test_every_rank_holds_the_whole_projection_of_the_captured_layers() -> None:
    hidden, layers = 5120, 5
    alone, of_two = demand().drafter_weights, demand("--tp-size", "2").drafter_weights
    whole = (layers * hidden * hidden + 2 * hidden + 5 * (2 * hidden + 2 * 128)) * 2  # projection and norms
    assert 2 * of_two - alone == whole


def test_a_table_has_the_rows_of_every_way() -> None:
    """Without a prefix cache, kept states leave no K/V on an H100: that way has no totals."""
    flags = ("--disable-radix-cache", "--gpu", "h100")
    shown = CliRunner().invoke(app, ["check", *PAIR.values(), *flags])
    assert shown.exception is None or isinstance(shown.exception, SystemExit)
    assert "tokens of K/V" in shown.stdout


@pytest.mark.parametrize("weighed", [True, False], ids=["headers", "no headers"])
def test_weights_that_cannot_fit_stop_a_server_if_headers_tell_their_size(weighed: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "Qwen3-Coder-Next", tmp_path / "pair")
    if weighed:  # a file of 148.4 GiB that takes no disk: it has a header, and a hole
        shape = [79_674_391_296]
        header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2 * shape[0]]}}).encode()
        with (folder / "target" / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 2 * shape[0])
    pair = {"target": str(folder / "target"), "drafter": str(folder / "drafter")}
    report = preflight(parse([], **pair)[0], GPUS["h200"])
    certain = [finding for finding in report.findings if finding.level == "error" and not finding.estimated]
    assert [finding.about for finding in certain] == (["weights"] if weighed else [])
    assert CliRunner().invoke(app, ["check", *pair.values(), "--gpu", "h200"]).exit_code == 2
    if weighed:
        with pytest.raises(DFlashError, match=r"weights of one rank take 149.* a larger --tp-size"):
            raise_first_error(report.findings)
        for smaller in (("--tp-size", "2"), ("--quantization", "fp8"), ("--cpu-offload-gb", "40")):
            raise_first_error(preflight(parse(smaller, **pair)[0], GPUS["h200"]).findings)
