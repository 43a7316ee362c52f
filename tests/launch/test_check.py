"""``sglang-dflash check``: the rules of the named machine, and the output."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from sglang_dflash.check import cli, machine
from sglang_dflash.check.cli import app
from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS, asked_about, gpu_named
from sglang_dflash.check.report import Report, preflight
from sglang_dflash.launch import published
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU, Device
from tests.support.broken_pairs import Broken, write_pair
from tests.support.configs import card_pair

HERE = Device("gpu", "NVIDIA H200", 141 << 30, (9, 0))
LARGE_GPU = asked_about(None, 141)
CARD = tuple(card_pair("Qwen3.5-27B").values())
USERS = ("8", "24", "32")


def run(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["check", *words], env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("gpu", "device", "memory_gib", "expected"),
    [
        (None, None, None, CPU),
        (None, "cuda", None, UNKNOWN_GPU),
        (None, None, 141, Device("gpu", "a GPU (sm_90 assumed) with 141 GiB", 141 << 30, (9, 0))),
        (None, "cpu", 64, Device("cpu", "a CPU with 64 GiB", 64 << 30)),
        (HERE, None, None, HERE),
        (HERE, "cpu", None, CPU),
        (HERE, None, 80, Device("gpu", "a GPU (sm_90 assumed) with 80 GiB", 80 << 30, (9, 0))),
    ],
)
def test_the_machine_of_a_command_line(
    gpu: Device | None, device: str | None, memory_gib: float | None, expected: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda _: gpu)
    assert asked_about(device, memory_gib) == expected


def test_a_machine_on_which_a_start_would_be_refused_is_named_unless_another_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about, here = "x this machine (--gpu checks another): ", replace(GPUS["h200"], is_local=True)
    monkeypatch.setattr(machine, "find_gpu", lambda _: None)
    assert about not in run(*CARD).stdout, "the CPU platform is installed"
    monkeypatch.setattr(cli, "installed_plugins", lambda: [])
    monkeypatch.setattr(torch.version, "cuda", None)
    for gpu, reason in (
        (None, "this machine has no accelerator"),
        (here, f"torch {torch.__version__} cannot use NVIDIA H200"),
    ):
        monkeypatch.setattr(machine, "find_gpu", lambda _, found=gpu: found)
        ended = run(*CARD)
        assert about + reason in ended.stdout and "Start:" not in ended.stdout
        assert ended.exit_code == 2
        assert about not in run(*CARD, "--gpu", "h200").stdout + run(*CARD, "--device", "cpu").stdout


def test_the_verdict_comes_first_and_a_note_never_changes_the_exit_status(tmp_path: Path) -> None:
    write_pair(tmp_path, Broken("", ""))
    pair = (str(tmp_path / "target"), str(tmp_path / "drafter"))
    (tmp_path / "target" / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {}}}')
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages }}")
    fits = run(*pair, "--dtype", "bfloat16", "--memory-gib", "141", "--context-length", "4096", "--enable-lora")
    verdict, *_, counts, start = fits.stdout.splitlines()
    assert verdict.endswith(" FITS: 48 of 48 requests at once") and "1 note." in counts
    assert start.startswith(f"Start: python -m sglang.launch_server --model-path {pair[0]}")
    assert fits.exit_code == 0, fits.stdout
    refused = run(*pair, "--gpu", "H100", "--speculative-num-draft-tokens", "17")
    assert refused.stdout.splitlines()[0].endswith(" REFUSED: 1 error") and "Start:" not in refused.stdout


def test_users_alone_name_the_block_that_the_drafters_card_had_fastest_at_that_load(tmp_path: Path) -> None:
    target, drafter = CARD
    (tmp_path / "Qwen3.5-27B-DFlash").symlink_to(drafter)  # a card is found by the drafter's last part
    shown = {users: run(target, str(tmp_path / "Qwen3.5-27B-DFlash"), "--users", users).stdout for users in USERS}
    fastest = "fastest with {} users on z-lab/Qwen3.5-27B-DFlash's card: "
    assert fastest.format(8) + "block 16 in 4 of 5 tasks, block 8 in 1 of 5 tasks" in shown["8"]
    assert fastest.format(32) + "block 8 in 5 of 5 tasks" in shown["32"]
    assert "fastest" not in shown["24"], "the card has no figure for 24 users"
    assert "fastest" not in run(*CARD, "--users", "32").stdout, "no card is known for this drafter"


@pytest.mark.parametrize("name", ["5090", "RTX 5090", "NVIDIA GeForce RTX 5090", "RTX5090"])
def test_a_gpu_is_found_by_the_end_of_its_name(name: str) -> None:
    assert gpu_named(name) is GPUS["rtx5090"]


def test_auto_is_the_published_drafter_of_the_target() -> None:
    known = published.published_drafters()
    assert {published.drafter_of(target) for target in known} == set(known.values())
    settings, _ = parse([], target="RadixArk/Qwen3.8-27B-NVFP4", drafter="auto")
    assert settings.speculative_draft_model_path == "incoai/Qwen3.8-27B-DFlash2"
    refused = run("qwen3.8-27b", "auto", "--gpu", "h200")
    assert refused.exit_code == 2 and "such as Qwen/Qwen3.8-27B," in refused.stdout


def test_a_target_without_a_drafter_is_offered_the_published_one(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = {"target": CARD[0], "drafter": CARD[1], "speed": []}
    monkeypatch.setattr(published, "published_pairs", lambda: {"Qwen3.5-27B": card})
    published.published_drafters.cache_clear()
    request.addfinalizer(published.published_drafters.cache_clear)
    assert f"auto serves the published drafter {CARD[1]}" in run(CARD[0], "--gpu", "h200").stdout
    with_drafter, with_auto = (run(CARD[0], each, "--gpu", "h200").stdout for each in (CARD[1], "auto"))
    assert with_auto == with_drafter and "FITS" in with_auto


def report(folder: Path, on: Device, *flags: str, **changes: Any) -> Report:
    write_pair(folder, Broken("", "", **changes))
    settings, _ = parse(flags, target=str(folder / "target"), drafter=str(folder / "drafter"))
    return preflight(settings, on)


@pytest.mark.parametrize(
    ("flags", "changes", "switch", "on_gpu", "named"),
    [
        ((), {}, "builtin", "warn", "SGLANG_DFLASH=builtin"),
        ((), {}, "on", "error", "SGLANG_DFLASH='on'"),
        ((), {"drafter": {"dflash_config": {"projector_type": "domino"}}}, "", "warn", "head domino"),
        (("--enable-watermark",), {}, "", "warn", "--enable-watermark"),
        (("--attn-cp-size", "2"), {}, "", "warn", "context parallelism"),
        (("--speculative-accept-threshold-acc", "0.9"), {}, "", "warn", "not lossless"),
        (("--dp-size", "2", "--tp-size", "2", "--enable-dp-attention"), {}, "", "error", "DP attention over 2 groups"),
        (("--attn-dp-size", "2", "--tp-size", "2"), {}, "", "error", "DP attention over 2 groups"),
        (("--enable-nvidia-megakernel",), {}, "", "error", "--enable-nvidia-megakernel"),
    ],
)
def test_the_worker_is_a_launchs(
    flags: tuple[str, ...], changes: Any, switch: str, on_gpu: str, named: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What SGLang's worker serves is a warning on a GPU, and an error on the CPU platform, which has only ours."""
    monkeypatch.setenv("SGLANG_DFLASH", switch)
    for on, level in ((LARGE_GPU, on_gpu), (CPU, "error")):
        found = report(tmp_path / on.kind, on, *flags, **changes)
        last = [each for each in found.findings if each.level == level][-1]
        assert named in last.value and found.plan is None and not last.estimated


@pytest.mark.parametrize("flag", ["--speculative-use-rejection-sampling", "--speculative-use-block-verification"])
def test_flags_of_sampled_acceptance_have_no_effect(flag: str) -> None:
    with_flag, without = (run(*CARD, "--gpu", "h200", *flags).stdout for flags in ([flag], []))
    assert f"{flag} has no effect: each committed token is the target's own draw" in " ".join(with_flag.split())
    assert "has no effect" not in without
