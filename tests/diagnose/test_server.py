"""Values read from ``/server_info``, and servers refused with one message."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_dflash.causes import QUANTISED_DRAFTER
from sglang_dflash.cli import app
from sglang_dflash.diagnose.probe import parse_server as parse
from sglang_dflash_lab.bench.server import free_port
from tests.diagnose.fake_server import FakeServer, serve

INFO: dict[str, Any] = {
    "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": "drafter",
    "speculative_num_draft_tokens": 16,
    "skip_tokenizer_init": False,
    "model_path": "target",
    "dtype": "auto",
    "quantization": None,
    "speculative_draft_model_quantization": "fp8",
    "max_running_requests": 64,
    "max_req_input_len": 8186,
    "uses_mamba_radix_cache": True,
    "launch_command": "--model-path target",
    "internal_states": [{"effective_max_running_requests_per_dp": 12, "avg_spec_accept_length": 2.5}],
}
WORKER: dict[str, Any] = {
    "dtype": "bfloat16",
    "adaptive": False,
    "requests": {"asked": 64, "running": 12, "capped_by": "verify scratch", "raised_by": "a narrower block"},
    "blocks_by_accept_length": {"1": 60, "4": 40},
    "drafting": {"pays": True, "accept_length": 2.2},
    "broken_drafts": 2,
    "width": {"policy": "fixed", "widths": [16]},
}


def with_worker(**changes: Any) -> dict[str, Any]:
    state = {**INFO["internal_states"][0], "sglang_dflash": WORKER | changes}
    return INFO | {"internal_states": [state]}


def test_sglangs_worker_without_our_entry() -> None:
    server = parse(INFO, '# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{rank="0"} 3.0\n')
    assert server.worker == "SGLang" and server.dtype == "auto"
    assert (server.max_running_requests, server.concurrent_requests, server.limited_by) == (64, 12, "recurrent states")
    assert "--mamba-full-memory-ratio" in server.raised_by
    assert (
        server.recent_accept_length == 2.5
        and server.other_running_requests == 3
        and server.quantised == {QUANTISED_DRAFTER: "fp8"}
    )
    dense = parse(INFO | {"uses_mamba_radix_cache": False})
    assert dense.limited_by == "tokens of K/V"
    assert parse(INFO | {"max_running_requests": 12}).limited_by == "--max-running-requests"


def test_our_worker_states_its_limits() -> None:
    server = parse(with_worker())
    assert server.worker == "sglang-dflash" and server.dtype == "bfloat16" and server.not_finite_drafts == 2
    assert (server.limited_by, server.raised_by) == ("verify scratch", "a narrower block")
    assert server.recent_accept_length == 2.2 and server.recent_cause is None and server.expected_per_block is None


def test_a_pool_size_set_by_the_user_is_named_first() -> None:
    server = parse(with_worker() | {"launch_command": "--model-path target --max-mamba-cache-size 36"})
    assert server.raised_by == "a larger --max-mamba-cache-size, a narrower block"


def test_few_blocks_give_no_accept_length() -> None:
    assert parse(with_worker(drafting={"pays": None, "accept_length": 1.2})).recent_accept_length is None


def test_the_gain_of_copied_blocks() -> None:
    copied: dict[str, Any] = {"copied_blocks": True, "copied_blocks_by_match_length": {}, "tokens_brought_by_copies": 0}
    assert parse(with_worker()).copied_blocks is None and parse(INFO).copied_blocks is None
    assert parse(with_worker(**copied)).copied_blocks == "0 of 100 blocks, 0 tokens gained over drafts"
    copied |= {"copied_blocks_by_match_length": {"4": 3, "16": 1}, "tokens_brought_by_copies": 12}
    expected = "4 of 100 blocks, 12 tokens gained over drafts"
    assert parse(with_worker(**copied)).copied_blocks == expected


def test_an_adaptive_width_is_judged_by_survival() -> None:
    width, drafting = {"survival": {"curve": [0.5, 0.25]}}, {"pays": True, "accept_length": 1.2}
    server = parse(with_worker(adaptive=True, width=width, drafting=drafting))
    assert server.expected_per_block == 1.75 and server.recent_accept_length is None


def test_the_workers_own_judgement_is_used() -> None:
    section = {"pays": False, "accept_length": 1.2, "causes": [{"cause": "x", "remedy": "y"}]}
    server = parse(with_worker(drafting=section))
    assert server.recent_accept_length == 1.2 and server.recent_cause == "x. Fix: y"


def diagnose(url: str, *options: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["diagnose", url, *options])
    return ended.exit_code, ended.output


def test_an_absent_server_is_one_message() -> None:
    code, output = diagnose(f"127.0.0.1:{free_port()}")
    assert code == 2 and "no SGLang server answers" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("info", "named"),
    [
        (INFO | {"speculative_algorithm": None}, "no speculation"),
        (INFO | {"speculative_algorithm": "EAGLE3"}, "EAGLE3"),
        (INFO | {"skip_tokenizer_init": True}, "--skip-tokenizer-init"),
    ],
)
def test_a_server_that_cannot_be_diagnosed_is_one_message(info: dict[str, Any], named: str) -> None:
    with serve(FakeServer(info)) as url:
        code, output = diagnose(url)
    assert code == 2 and named in output, output


def test_a_missing_key_names_the_option() -> None:
    with serve(FakeServer(status=401)) as url:
        code, output = diagnose(url)
    assert code == 2 and "--api-key" in output, output


@pytest.mark.parametrize(("accepted", "code", "ends"), [(3, 0, "No problem was found."), (0, 1, "of this target.")])
def test_the_command_prints_its_tables_and_verdict(accepted: int, code: int, ends: str) -> None:
    info = with_worker(requests=WORKER["requests"] | {"running": 64}) | {"speculative_draft_model_quantization": None}
    with serve(FakeServer(info, accepted=accepted)) as url:
        status, output = diagnose(url)
    assert status == code and output.rstrip().endswith(ends), output
    assert all(f" {name} " in output for name in ("chat template: math", "raw prompts", "8 users at once")), output
