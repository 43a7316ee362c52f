"""Flags that are named where too few requests run: each with the numbers that the preflight gives with that flag."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sglang_dflash.cli import app
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import GPUS, asked_about
from sglang_dflash.plan.memory import MemoryTable
from sglang_dflash.plan.report import Report, preflight
from tests.support.cards import FOLDER

PAIR = {"target": str(FOLDER / "Qwen3.5-27B" / "target"), "drafter": str(FOLDER / "Qwen3.5-27B" / "drafter")}
FLAGS = (
    *("--mem-fraction-static", "0.75"),
    *("--speculative-num-draft-tokens", "16"),
    *("--mamba-radix-cache-strategy", "extra_buffer"),
)
OWN_RATIO = ("--mamba-full-memory-ratio", "0.89")  # SGLang's 0.9 would be made a better one
SWITCH = "SGLANG_DFLASH_STATE_REPLAY"


def checked(*flags: str) -> Report:
    return preflight(parse([*FLAGS, *OWN_RATIO, *flags], **PAIR)[0], asked_about(None, 141))


def memory(*flags: str) -> MemoryTable:
    table = checked(*flags).memory
    assert table is not None
    return table


def advised(*flags: str) -> dict[str, tuple[int, int]]:
    return {advice.flag: (advice.running, advice.tokens) for advice in checked(*flags).advice}


@pytest.mark.parametrize(
    ("switch", "own"),
    [
        # a ring of records is no shorter for a block of 8
        ("0", {"--speculative-num-draft-tokens", "--mamba-full-memory-ratio"}),
        # a slot less is little compared with a state for every position; a higher ratio takes a context's K/V
        ("1", {"--mamba-radix-cache-strategy"}),
    ],
    ids=["kept", "replayed"],
)
def test_a_flag_gives_what_it_is_said_to_give(switch: str, own: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, switch)
    advice = advised()
    assert {flag.split()[0] for flag in advice} == {
        "--mem-fraction-static",
        "--mamba-ssm-dtype",
        "--speculative-draft-window-size",
    } | own
    for flag, expected in advice.items():
        fitted = memory(*flag.split()).served
        assert (fitted.running, fitted.tokens) == expected, flag


@pytest.mark.parametrize("users", ["16", "24"])  # with more slots, 16 would run with kept states too
@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy"])
def test_prefixes_kept_and_what_they_cost(strategy: str, users: str) -> None:
    """Each flag keeps as many as it is said to keep, and leaves as much K/V."""
    own = ("--mamba-radix-cache-strategy", strategy, "--max-running-requests", users)
    before = memory(*own).served
    found = {each.flag: (each.running, each.tokens, each.prefixes) for each in checked(*own).prefixes}
    assert {flag.split()[0] for flag in found} == {
        *("--max-mamba-cache-size", "--mamba-ssm-dtype"),
        "--speculative-draft-window-size",
        *(["--mamba-radix-cache-strategy"] if strategy == "extra_buffer" else []),
    }
    for flag, expected in found.items():
        after = memory(*own, *flag.split()).served
        assert after.replay and (after.running, after.tokens, after.prefixes()) == expected, flag
        assert after.prefixes() > before.prefixes() or after.tokens > before.tokens
    size = ("--max-mamba-cache-size", str(before.state_slots + 1), "--enable-linear-replayssm-spec")
    one_more = memory(*own, *size).served
    assert one_more.prefixes() == before.prefixes() + 1
    assert before.tokens - one_more.tokens == pytest.approx(before.state_price, abs=1)


def test_all_run_with_the_mildest_ratio() -> None:
    short = ("--context-length", "2048")  # a longer one takes the K/V that states for all would leave
    better = preflight(parse([*FLAGS, *short], **PAIR)[0], asked_about(None, 141)).memory
    assert better is not None and better.other is not None
    assert better.served.sizing.state_share == 2.4 and (better.served.running, better.other.running) == (48, 7)
    assert memory(*short, "--mamba-full-memory-ratio", "2.3").served.running < 48
    assert advised(*short)["--mamba-full-memory-ratio 2.4"][0] == 48


def test_fewer_requests_are_advised_where_their_scratch_takes_the_states_memory() -> None:
    [flag] = [flag for flag in advised("--max-running-requests", "500") if flag.startswith("--max-running-requests")]
    assert memory("--max-running-requests", "500").served.running < memory(*flag.split()).served.running
    assert not any(flag.startswith("--max-running-requests") for flag in advised())


def test_nothing_is_advised_where_all_run_but_a_draft_window() -> None:
    assert [flag.split()[0] for flag in advised("--max-running-requests", "8")] == ["--speculative-draft-window-size"]
    assert not advised("--max-running-requests", "8", "--speculative-draft-window-size", "4096")


def test_the_user_is_told_of_both_numbers_and_the_flags() -> None:
    args = parse([*FLAGS, *OWN_RATIO, "--max-running-requests", "64"], **PAIR)[0]
    [finding] = [each for each in preflight(args, asked_about(None, 141)).findings if each.about == "running requests"]
    assert finding.level == "warn"
    assert finding.value.startswith("only 30 of 64 requests (--max-running-requests) fit at once, with 333")
    assert "recurrent states" in finding.expected
    assert "--mamba-full-memory-ratio" in finding.remedy and "(48 fit," not in finding.remedy


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_can_be_asked_about_by_name(name: str) -> None:
    printed = CliRunner().invoke(app, ["check", *PAIR.values(), "--gpu", name, "--json"]).stdout
    table = json.loads(printed)["memory"]
    memory = GPUS[name].memory
    assert memory is not None and table["static_bytes"] == int(memory * 0.85)
    assert table["device"] == GPUS[name].name
    replayed, kept = table["served"], table["other"]
    assert replayed["replay"] and kept["running"] < replayed["running"]


def test_a_gpu_by_name_has_its_own_memory() -> None:
    told = CliRunner().invoke(app, ["check", *PAIR.values(), "--gpu", "h100", "--memory-gib", "141"])
    assert told.exit_code == 2 and "mutually exclusive" in told.output


def test_blackwells_rules_hold_for_a_b200() -> None:
    args = parse(["--attention-backend", "fa3"], **PAIR)[0]
    levels = {found.about: found.level for found in preflight(args, asked_about(None, None, "b200")).findings}
    assert levels["--attention-backend"] == "error"
    assert {name: gpu.is_blackwell for name, gpu in GPUS.items()} == {"h100": False, "h200": False, "b200": True}
