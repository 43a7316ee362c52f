"""Server arguments and variables: read by our parser, which has SGLang's flags, defaults and rules."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import sglang_dflash
from sglang_dflash.check import flags
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.settings import COPIES_SWITCH, READ, Settings, in_transfer, slots_per_request
from tests.support.configs import DRAFTER, launch_of


def parse(*words: str) -> tuple[Settings, list[str]]:
    return flags.parse(words, target="t", drafter="d")


def test_what_is_read_is_listed_and_is_an_argument_of_sglangs() -> None:
    """``check`` names other flags of a command as not counted."""
    package = Path(sglang_dflash.__path__[0])
    texts = [file.read_text() for room in ("launch", "check") for file in (package / room).glob("*.py")]
    named = {name for text in texts for name in re.findall(r"\b(?:self\.settings|settings|self)\.([a-z0-9_]+)", text)}
    known = vars(parse()[0].arguments).keys()
    assert named & known == READ | {"speculative_algorithm"} and known >= READ


@pytest.mark.parametrize(
    ("words", "found", "remedy"),
    [
        ("--speculative-num-draft-tokns 16", "no flag --speculative-num-draft-tokns", "--speculative-num-draft-tokens"),
        ("--tp-size 2 bogus", "the word 'bogus'", "leave it out"),
        ("--attention-backend foo", "--attention-backend: invalid choice: 'foo'", "correct"),
        ("--speculative-draft-attention-backend=foo", "invalid choice: 'foo'", "correct"),
        ("--log-requests-level 9", "invalid choice: 9", "correct"),
        ("--chunked-prefill-size many", "--chunked-prefill-size", "correct"),
        ("--speculative-algorithm EAGLE", "--speculative-algorithm EAGLE", "leave --speculative-algorithm out"),
        ("--model-path other", "--model-path other", "leave --model-path out"),
        ("--model t --model-path other", "--model-path other", "leave --model-path out"),
        ("--speculative-draft-model x", "--speculative-draft-model-path x", "leave"),
    ],
)
def test_a_word_that_a_server_does_not_accept_is_an_error(words: str, found: str, remedy: str) -> None:
    with pytest.raises(DFlashError) as caught:
        parse(*words.split())
    assert found in caught.value.problem and remedy in caught.value.remedy


def test_a_cards_command_can_be_pasted_after_the_models() -> None:
    pasted = "--model-path t --speculative-algorithm DFLASH --tp-size 2 --host 0.0.0.0"
    settings, unread = parse(*pasted.split())
    assert (settings.model_path, settings.speculative_draft_model_path, settings.tp_size) == ("t", "d", 2)
    assert unread == ["--host"]


def test_flags_that_are_not_read_or_in_part_are_named() -> None:
    for words in ("--host 0.0.0.0", "--enable-lora", "--enable-hierarchical-cache", "--bucket-e2e-request-latency 1 2"):
        [finding] = flags.check_unread(parse("--tp-size", "2", *words.split())[1])
        assert finding.level == "note" and words.split()[0] in finding.value


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        ("", 5),
        ("--mamba-radix-cache-strategy extra_buffer", 5),
        ("--mamba-radix-cache-strategy extra_buffer_lazy", 4),
        ("--disable-overlap-schedule", 4),
        ("--mamba-radix-cache-strategy no_buffer", 3),
        ("--mamba-radix-cache-strategy extra_buffer --disable-radix-cache", 1),
        ("--disaggregation-mode decode", 1),
        ("--disaggregation-mode prefill", 5),
    ],
)
def test_state_slots_of_a_running_request(words: str, slots: int) -> None:
    assert slots_per_request(parse(*words.split())[0]) == slots


@pytest.mark.parametrize(
    ("words", "waiting"),
    [
        ("", None),
        ("--disaggregation-mode prefill", 0),
        ("--disaggregation-mode decode", 0),
        ("--disaggregation-mode decode --max-running-requests 33", 0),
        ("--disaggregation-mode decode --max-running-requests 32", 64),
        ("--disaggregation-mode decode --max-running-requests 32 --disaggregation-decode-extra-slots 5", 5),
    ],
)
def test_requests_in_transfer(words: str, waiting: int | None) -> None:
    assert in_transfer(parse(*words.split())[0]) == waiting


@pytest.mark.sglang
def test_sglang_allocates_no_verify_scratch_on_a_prefill_server() -> None:
    """Both the budget and the pool call one function, which has three exceptions."""
    pytest.importorskip("sglang")
    from sglang.srt.mem_cache import kv_cache_configurator as configurator

    skips = "_pd_prefill_skips_mamba_spec_state()"
    budget = inspect.getsource(configurator.KVCacheConfigurator._handle_max_mamba_cache)
    pool = inspect.getsource(configurator.KVCacheConfigurator._build_hybrid_req_pool)
    assert f"and not {skips}" in budget and f"None\n                if {skips}" in pool
    rule = inspect.getsource(configurator._pd_prefill_skips_mamba_spec_state)
    exceptions = ("disagg.enable_pd_role_switch", "get_memory().enable_unified_memory", "_is_npu")
    assert 'disagg.disaggregation_mode == "prefill"' in rule
    assert rule.count("and not ") == 3 and all(f"and not {each}" in rule for each in exceptions)


@pytest.mark.parametrize(
    ("switch", "adaptive", "copied"),
    [("", False, False), ("", True, True), ("1", False, True), ("0", True, False), ("1", True, True)],
)
def test_blocks_are_copied_with_adaptive_widths_unless_chosen_otherwise(
    switch: str, adaptive: bool, copied: bool
) -> None:
    launch = launch_of(DRAFTER, environ={COPIES_SWITCH: switch}, speculative_adaptive=adaptive)
    assert launch.copies is copied


def test_an_invalid_variable_is_refused() -> None:
    with pytest.raises(DFlashError, match=COPIES_SWITCH):
        Settings(environ={COPIES_SWITCH: "yes"}).validate()
