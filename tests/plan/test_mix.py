"""The split that is proposed for a stated mix serves it, with the numbers that the preflight gives with its flags."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from sglang_dflash.cli import app
from sglang_dflash.errors import Finding
from sglang_dflash.plan.advice import Load
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import GPUS
from sglang_dflash.plan.pools import Pools
from sglang_dflash.plan.report import preflight
from tests.support.cards import FOLDER

BLOCK = ("--speculative-num-draft-tokens", "16")


def asked(name: str, mix: Load, *flags: str, gpu: str = "h200") -> tuple[Finding, Pools]:
    pair = {"target": str(FOLDER / name / "target"), "drafter": str(FOLDER / name / "drafter")}
    report = preflight(parse([*BLOCK, *flags], **pair)[0], GPUS[gpu], mix)
    assert report.memory is not None
    return report.findings[-1], report.memory.served


def proposals(finding: Finding) -> list[tuple[list[str], int, int]]:
    """Flags, tokens of K/V and contexts, of every proposal of a remedy."""
    found = re.findall(r"(--.+?) \((\d+) tokens of K/V, (\d+) contexts kept\)", finding.remedy)
    return [(flags.split(), int(tokens), int(contexts)) for flags, tokens, contexts in found]


@pytest.mark.parametrize(
    ("name", "mix"),
    [
        ("Qwen3.5-27B", Load(48, 16_000, 0)),
        ("Qwen3.6-27B", Load(16, 8_000, 60)),
        ("Qwen3.5-4B", Load(8, 32_000, 60)),
        ("Qwen3.6-35B-A3B", Load(48, 16_000, 48)),
    ],
)
@pytest.mark.parametrize("own", [(), ("--mem-fraction-static", "0.75")], ids=["default", "cards'"])
def test_the_proposed_flags_serve_the_mix(name: str, mix: Load, own: tuple[str, ...]) -> None:
    finding, before = asked(name, mix, *own)
    if finding.level == "ok":
        assert mix.fits(before) and mix.contexts_in(before) >= mix.conversations
        return
    assert not (mix.fits(before) and mix.contexts_in(before) >= mix.conversations)
    [(flags, tokens, contexts)] = proposals(finding)
    after, pools = asked(name, mix, *own, *flags)
    assert after.level == "ok", after
    assert (pools.tokens, mix.contexts_in(pools)) == (tokens, contexts)
    assert pools.running == mix.users and tokens >= mix.users * mix.context and contexts >= mix.conversations


def test_states_go_no_further_than_kv_for_them() -> None:
    """A state more or less keeps no more contexts."""
    mix = Load(8, 8_000, 60)
    [(flags, _, contexts)] = proposals(asked("Qwen3.5-27B", mix)[0])
    at = flags.index("--max-mamba-cache-size") + 1
    assert int(flags[at]) > 8 * 5
    for other in (-2, 2):
        changed = [*flags[:at], str(int(flags[at]) + other), *flags[at + 1 :]]
        assert mix.contexts_in(asked("Qwen3.5-27B", mix, *changed)[1]) <= contexts


def test_what_nothing_serves_is_said_with_what_would() -> None:
    mix = Load(48, 32_000, 0)
    finding, _ = asked("Qwen3.5-27B", mix)
    assert finding.level == "warn" and finding.remedy.startswith("nothing serves them here: at most ")
    [most, *others] = proposals(finding)
    users = int(most[0][1])
    assert 1 < users < 48 and asked("Qwen3.5-27B", replace(mix, users=users), *most[0])[0].level == "ok"
    assert asked("Qwen3.5-27B", replace(mix, users=users + 1))[0].remedy.startswith("nothing serves")
    assert [flags[0] for flags, _, _ in others] == ["--tp-size", "--kv-cache-dtype"]
    for flags, _, _ in others:
        assert asked("Qwen3.5-27B", mix, *flags)[0].level == "ok"


def test_contexts_that_nothing_keeps_are_counted_as_far_as_they_go() -> None:
    mix = Load(8, 32_000, 1000)
    [(flags, _, contexts), *_] = proposals(asked("Qwen3.5-4B", mix)[0])
    assert 8 < contexts < 1000
    assert asked("Qwen3.5-4B", replace(mix, conversations=contexts), *flags)[0].level == "ok"


def test_users_and_context_belong_together() -> None:
    pair = [str(FOLDER / "Qwen3.5-4B" / model) for model in ("target", "drafter")]
    told = CliRunner().invoke(app, ["check", *pair, "--users", "4"])
    assert told.exit_code == 2 and "must be given together" in told.output
    shown = CliRunner().invoke(app, ["check", *pair, "--gpu", "h200", "--users", "4", "--context", "1000"])
    assert "4 users of 1000 tokens: served" in shown.stdout
