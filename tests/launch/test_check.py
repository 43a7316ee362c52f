"""``sglang-dflash check``: the rules of the named machine, and the output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

from sglang_dflash.check import command, machine
from sglang_dflash.check.cli import app
from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS, asked_about, gpu_named
from sglang_dflash.launch import published, resolution
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU, Device
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.rules import EARLY
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
    monkeypatch.setattr(command, "installed_plugins", lambda: [])
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


def test_users_choose_the_block_that_the_drafters_card_had_fastest_at_that_load(tmp_path: Path) -> None:
    target, drafter = CARD
    own = tmp_path / "Qwen3.5-27B-DFlash"
    own.symlink_to(drafter)  # a card is found by the drafter's last part
    shown = {users: run(target, str(own), "--users", users).stdout for users in USERS}
    fastest, block = "fastest with {} users on z-lab/Qwen3.5-27B-DFlash's card: ", " --speculative-num-draft-tokens "
    assert fastest.format(8) + "block 16 in 4 of 5 tasks, block 8 in 1 of 5 tasks" in shown["8"]
    assert fastest.format(32) + "block 8 in 5 of 5 tasks" in shown["32"] and "  block 8, " in shown["32"]
    for users, last in (("8", f"{block}16"), ("32", f"{block}8"), ("24", str(own))):
        assert shown[users].rstrip().endswith(last)
    assert "has figures for 1, 8, 16, 32 users, not for 24" in shown["24"]
    assert "has no figures that are known here" in run(*CARD, "--users", "32").stdout
    typed = run(target, str(own), "--users", "32", "--speculative-num-draft-tokens", "4").stdout
    assert "  block 4, " in typed and typed.count(block) == 1


@pytest.mark.parametrize("name", ["5090", "RTX 5090", "NVIDIA GeForce RTX 5090", "RTX5090"])
def test_a_gpu_is_found_by_the_end_of_its_name(name: str) -> None:
    assert gpu_named(name) is GPUS["rtx5090"]


def test_auto_is_the_published_drafter_of_the_target() -> None:
    cards = published.published_pairs().values()
    assert [published.drafter_of(card["target"]) for card in cards] == [card["drafter"] for card in cards]
    settings, _ = parse([], target="RadixArk/Qwen3.8-27B-NVFP4", drafter="auto")
    assert settings.speculative_draft_model_path == "incoai/Qwen3.8-27B-DFlash2"


@pytest.mark.parametrize(
    "target",
    ["qwen/qwen3.5-27b", "Qwen3.5-27B", "./Qwen3.5-27B", "/models/Qwen3.5-27B/", "Qwen/Qwen3.5-27B-FP8"]
    + [f"someone/Qwen3.5-27B-{end}" for end in ("AWQ", "INT4", "NVFP4", "FP8-dynamic", "AWQ-4bit", "quantized.w4a16")]
    + ["/root/.cache/huggingface/hub/models--Qwen--Qwen3.5-27B/snapshots/0a1b2c"],
)
def test_a_target_is_found_by_its_name_in_any_case_folder_and_quantisation(target: str) -> None:
    assert published.drafter_of(target) == "z-lab/Qwen3.5-27B-DFlash"


def named(folder: Path, target: str, drafter: str, **verifier: str) -> list[str]:
    """The pair of a card under other names; a trainer may have written the target's."""
    for name, source in ((target, CARD[0]), (drafter, CARD[1])):
        config = json.loads((Path(source) / "config.json").read_text())
        if name == drafter and verifier:
            config["speculators_config"] = {"verifier": verifier}
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    index = Path(CARD[0]) / "model.safetensors.index.json"
    (folder / target / index.name).write_text(index.read_text())
    return [str(folder / target), str(folder / drafter)]


TRAINED = "was trained for"


@pytest.mark.parametrize(
    ("target", "drafter", "level", "said"),
    [
        ("Qwen3.5-27B", "Qwen3.6-27B-DFlash", "!", f"{TRAINED} Qwen/Qwen3.6-27B, and the target is"),
        ("Qwen3.8-27B-FP8", "Qwen3.6-27B-DFlash", "!", f"{TRAINED} Qwen/Qwen3.6-27B, and the target is"),
        ("Qwen3.6-27B", "Qwen3.8-27B-DFlash2", "!", f"{TRAINED} Qwen/Qwen3.8-27B, and the target is"),
        ("Qwen3.5-27B-AWQ", "Qwen3.5-27B-DFlash", "-", f"{TRAINED} Qwen/Qwen3.5-27B, the base model of"),
        ("Qwen3.5-27B", "Qwen3.5-27B-DFlash", "", ""),
        ("target", "Qwen3.5-27B-DFlash", "", ""),  # the name of a folder proves nothing
        ("Qwen3.5-27B", "drafter", "", ""),
    ],
)
def test_a_pair_of_two_published_names_is_a_warning_with_both(
    target: str, drafter: str, level: str, said: str, tmp_path: Path
) -> None:
    words = named(tmp_path, target, drafter)
    shown = run(*words, "--gpu", "h200").stdout
    found = [line for line in shown.splitlines() if TRAINED in line]
    assert [line.split()[0] for line in found] == [level][: bool(level)] and all(said in line for line in found)
    if level == "!":
        assert words[0] in found[0] and "Fix: use " in shown


def test_a_start_warns_of_another_targets_drafter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = dict(zip(("target", "drafter"), named(tmp_path, "Qwen3.5-27B", "Qwen3.6-27B-DFlash"), strict=True))
    launch = Launch.of(parse([], **pair)[0], LARGE_GPU)
    resolution._is_left(SimpleNamespace(), launch, EARLY)  # type: ignore[arg-type]
    [warned] = [record for record in caplog.records if TRAINED in record.getMessage()]
    assert warned.levelname == "WARNING"
    assert all(name in warned.getMessage() for name in ("Qwen/Qwen3.6-27B", pair["target"], pair["drafter"]))


def test_a_trainers_note_of_the_target_is_compared_with_a_target_that_can_be_named(tmp_path: Path) -> None:
    pair = named(tmp_path, "Qwen3.5-27B", "drafter", name_or_path="Qwen/Qwen3.6-27B")
    assert f"{TRAINED} Qwen/Qwen3.6-27B, and the target is" in run(*pair, "--gpu", "h200").stdout
    pair = named(tmp_path / "same", "Qwen3.5-27B", "drafter", name_or_path="Qwen/Qwen3.5-27B-FP8")
    assert TRAINED not in run(*pair, "--gpu", "h200").stdout


def test_online_quantisation_of_plain_weights_counts() -> None:
    plain, fp8, other = (
        json.loads(run(*CARD, "--gpu", "h200", "--json", *flags).stdout)
        for flags in ([], ["--quantization", "fp8"], ["--quantization", "awq"])
    )
    sizes = [each["memory"]["served"]["sizing"]["target_weights"] for each in (plain, fp8, other)]
    assert 0.5 < sizes[1] / sizes[0] < 0.6 and sizes[2] == sizes[0]
    assert "does not count --quantization awq" in str(other["findings"])


def test_help_and_a_misspelt_command_import_neither_torch_nor_sglang() -> None:
    code = "import sys; from sglang_dflash.check.cli import app\ntry: app({})\nexcept SystemExit: pass\n"
    code += "print({{'torch', 'sglang', 'transformers', 'httpx'}} & sys.modules.keys())"
    for words in (["--help"], ["version"], ["chekc"], ["check", "--help"], ["bench"][:0]):
        ended = subprocess.run([sys.executable, "-c", code.format(words)], capture_output=True, text=True, check=True)
        assert ended.stdout.splitlines()[-1] == "set()", (words, ended.stdout)
