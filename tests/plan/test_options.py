"""The preflight parses server flags by itself: they are SGLang's, with SGLang's defaults."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan import flags
from sglang_dflash.plan.flags import HARMFUL, HARMLESS, LIST, check_unread, known_flags
from sglang_dflash.plan.settings import Settings
from tools import drift

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")


@pytest.fixture(scope="module")
def upstream() -> ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.mark.parametrize("flag", flags.read_fields())
def test_a_flag_is_sglangs(flag: str, upstream: ArgumentParser) -> None:
    action = upstream._option_string_actions[flag]
    assert action.dest == flag.removeprefix("--").replace("-", "_")
    assert action.default == flags.read_fields()[flag].default


def test_the_list_of_flags_is_sglangs() -> None:
    import sglang

    theirs = drift.flags(Path(sglang.__path__[0]).parent)
    assert json.loads(LIST.read_text()) == theirs, "run `make drift`"


@pytest.mark.parametrize("text", ["32768", " 32k", "25.6k", "32Ki", "1M", "2Gi", "3G", "1T", "1Ti"])
def test_a_number_of_tokens_is_read_as_sglang_reads_it(text: str) -> None:
    from sglang.srt.utils.common import human_readable_int

    assert flags.count(text) == human_readable_int(text)
    assert parse("--context-length", text)[0].context_length == flags.count(text)


def parse(*words: str) -> tuple[Settings, list[str]]:
    return flags.parse(words, target="t", drafter="d")


@pytest.mark.parametrize(
    ("words", "found", "remedy"),
    [
        (
            ("--speculative-num-draft-tokns", "16"),
            "no flag --speculative-num-draft-tokns",
            "--speculative-num-draft-tokens",
        ),
        (("--tp-size", "2", "bogus"), "the word 'bogus'", "leave it out"),
        (("--attention-backend", "foo"), "--attention-backend: invalid choice: 'foo'", "correct"),
        (("--speculative-draft-attention-backend=foo",), "invalid choice: 'foo'", "correct"),
        (("--log-requests-level", "9"), "invalid choice: 9", "correct"),
        (("--chunked-prefill-size", "many"), "--chunked-prefill-size", "correct"),
        (("--speculative-algorithm", "EAGLE"), "--speculative-algorithm EAGLE", "leave --speculative-algorithm out"),
        (("--model-path", "other"), "--model-path other", "leave --model-path out"),
        (("--model", "t", "--model-path", "other"), "--model-path other", "leave --model-path out"),
        (("--speculative-draft-model", "x"), "--speculative-draft-model-path x", "leave"),
    ],
)
def test_a_word_that_a_server_does_not_take_is_an_error(words: tuple[str, ...], found: str, remedy: str) -> None:
    with pytest.raises(DFlashError) as caught:
        parse(*words)
    assert found in caught.value.value and remedy in caught.value.remedy


def test_flags_that_the_preflight_does_not_read_are_warned_of_unless_they_cannot_matter() -> None:
    harmless = ("--host", "0.0.0.0", "--bucket-e2e-request-latency", "1", "2", "--enable-metrics")
    [finding] = check_unread(parse(*harmless)[1])
    assert (finding.level, finding.about) == ("ok", "flags ignored")
    assert set(finding.value.split()) == {"--host", "--bucket-e2e-request-latency", "--enable-metrics"}
    for flag in ("--enable-lora", "--enable-hierarchical-cache", "--enable-mixed-chunk"):
        [finding] = check_unread(parse(flag)[1])
        assert finding.level == "warn" and flag in finding.value


def test_no_pattern_of_harmless_flags_is_left_over() -> None:
    names = [flag.names[0] for flag in known_flags()]
    for pattern in (*HARMLESS, *HARMFUL):
        assert any(name.startswith(pattern) for name in names), pattern


def test_a_cards_command_can_be_pasted_after_the_models() -> None:
    pasted = ["--model-path", "t", "--speculative-algorithm", "DFLASH", "--tp-size", "2", "--host", "0.0.0.0"]
    settings, unread = parse(*pasted)
    assert (settings.model_path, settings.speculative_draft_model_path, settings.tp_size) == ("t", "d", 2)
    assert unread == ["--host"]
