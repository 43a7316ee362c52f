"""From the command line to what is run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.cli import app
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import settings as module
from sglang_dflash_lab.bench.modes import Mode, parse_modes
from sglang_dflash_lab.bench.options import Options
from sglang_dflash_lab.bench.settings import Settings


def settings(**changes: object) -> Settings:
    options = Options(pair="tiny-hybrid", modes="ar,dflash:16", num_prompts=4, out=Path("out"))
    return module.configure(replace(options, **changes))


def test_modes_with_their_servers_environment_and_urls():
    text = "ar,dflash:8,builtin:16,mtp:3,dflash:16+A=1+B=x:2"
    modes = tuple(parse_modes(text))
    assert [(mode.kind, mode.size, mode.block) for mode in modes] == [
        ("ar", 0, None), ("dflash", 8, 8), ("builtin", 16, 16), ("mtp", 3, 4), ("dflash", 16, 16),
    ]  # fmt: skip
    assert [mode.label for mode in modes] == text.split(",")
    assert (modes[2].server_env(), modes[4].server_env()) == ({"SGLANG_DFLASH": "builtin"}, {"A": "1", "B": "x:2"})
    urls = module.base_urls(["ar=http://a:1", "dflash:16+A=1=http://b:2"], tuple(parse_modes("ar,dflash:16+A=1")))
    assert urls == {"ar": "http://a:1", "dflash:16+A=1": "http://b:2"}
    assert module.base_urls(["http://a:1"], modes[:1]) == {"ar": "http://a:1"}


@pytest.mark.parametrize("text", ["dflash", "ar:8", "dflash:x", "eagle:3", "", "dflash:8+A"])
def test_what_is_not_a_mode_is_refused_with_the_forms(text: str):
    with pytest.raises(DFlashError, match="dflash:BLOCK"):
        Mode.parse(text)


def test_mtp_needs_a_target_that_has_it(tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"text_config": {"mtp_num_hidden_layers": 1}}))
    arguments = Mode.parse("mtp:3").server_args(str(tmp_path), None)
    assert arguments[arguments.index("--speculative-num-draft-tokens") + 1] == "4"
    config.write_text("{}")
    with pytest.raises(DFlashError, match="multi-token-prediction"):
        Mode.parse("mtp:3").server_args(str(tmp_path), None)


def test_launch_of_each_arm():
    plain, dflash = (settings().launch(mode) for mode in settings().modes)
    assert "--speculative-algorithm" not in plain.args
    assert dflash.args[dflash.args.index("--speculative-dflash-block-size") + 1] == "16"
    assert dflash.args[dflash.args.index("--max-running-requests") + 1] == "8"
    shared = {"--model-path", "--dtype", "--max-running-requests", "--sleep-on-idle"}
    assert shared <= set(plain.args) & set(dflash.args)


def test_only_builtin_arms_get_the_shims():
    chosen = settings(modes="dflash:16,builtin:16", builtin_shims=Path("shims"))
    ours, builtin = (dict(chosen.launch(mode).env) for mode in chosen.modes)
    assert ours == {}
    assert builtin == {"SGLANG_DFLASH": "builtin", "PYTHONPATH": "shims"}


def test_defaults_follow_the_pair():
    tiny, card = settings(), settings(pair="Qwen3.5-4B")
    assert (tiny.sampling.thinking, tiny.sampling.max_tokens, tiny.together) == (False, 512, True)
    assert tiny.tasks == ("math", "code", "json", "chat")
    assert (card.sampling.thinking, card.sampling.max_tokens, card.together) == (True, 4096, False)
    assert card.tasks == ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
    assert card.pair.drafter == "z-lab/Qwen3.5-4B-DFlash"
    assert settings(thinking=True).sampling.thinking is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pair": "tiny-huge"}, "tiny-huge"),
        ({"pair": None}, "--pair NAME, or --target"),
        ({"tasks": "gsm9k"}, "gsm9k"),
        ({"concurrency": "1,x"}, "--concurrency '1,x'"),
        ({"concurrency": "0"}, "positive numbers"),
        ({"base_url": ["localhost:1"]}, "begin it with http://"),
        ({"base_url": ["http://localhost:1"]}, "a running server for every mode"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(changes: dict[str, object], message: str):
    with pytest.raises(DFlashError, match=message):
        settings(**changes)


def test_the_command_line_reports_a_users_error_in_one_line(tmp_path: Path):
    outcome = CliRunner().invoke(app, ["bench", "--pair", "tiny-huge"])
    assert outcome.exit_code == 2
    assert outcome.output.startswith("sglang-dflash: pair 'tiny-huge'")
    outcome = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert outcome.exit_code == 2
    assert "no finished run" in outcome.output
