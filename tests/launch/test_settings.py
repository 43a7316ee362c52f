"""Server arguments and variables: read by our parser, which has SGLang's flags, defaults and rules."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from sglang_dflash.check import flags
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.old_flags import modernise_argv
from sglang_dflash.launch.settings import Settings, in_transfer, slots_per_request


def parse(*words: str) -> tuple[Settings, list[str]]:
    return flags.parse(words, target="t", drafter="d")


def test_settings_record_the_names_that_are_read() -> None:
    settings, given = parse("--tp-size", "2", "--page-size", "16")
    changed = settings.changed(tp_size=4)
    assert (changed.tp_size, settings.tp_size) == (4, 2)
    assert settings.read == changed.read == {"tp_size"} and {*given} == {"tp_size", "page_size"}


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


def test_a_launch_without_a_target_is_refused() -> None:
    with pytest.raises(DFlashError, match="--model-path"):
        flags.parse(["--tp-size", "2"], target=None, drafter=None)


def test_flags_that_are_not_read_or_in_part_are_named_and_those_that_cannot_matter_are_not() -> None:
    def named(words: str) -> str:
        settings, given = parse(*words.split())
        settings.read.update({"tp_size", "enable_lora", "enable_hierarchical_cache"})
        return " ".join(found.value for found in flags.check_unread(given, settings))

    for words in ("--enable-lora", "--enable-hierarchical-cache", "--moe-runner-backend triton"):
        assert words.split()[0] in named(f"--tp-size 2 {words}")
    silent = "--host 0.0.0.0 --port 80 --api-key k --served-model-name m --enable-metrics --random-seed 1"
    assert named(silent) == "" == named("--tp-size 2")
    assert named("--speculative-num-steps 7") == "--speculative-num-steps has no effect with DFLASH"


def test_a_configuration_file_is_read_as_sglang_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("tp-size: 4\nspeculative-dflash-draft-window-size: 512\nmodel-path: t\n")
    words, notes = modernise_argv(flags.merged(["--config", str(file), "--tp-size", "2"]))
    settings, _ = flags.parse(words, target=None, drafter=None)
    assert (settings.model_path, settings.tp_size, settings.speculative_draft_window_size) == ("t", 2, 512) and notes
    for path, text in ((tmp_path / "absent.yaml", None), (tmp_path / "bad.yaml", "[")):
        if text:
            path.write_text(text)
        with pytest.raises(DFlashError, match="--config: "):
            flags.merged(["--config", str(path)])


@pytest.mark.parametrize("path", ["/nonexistent/dir", "./nodir", "~/nodir"])
def test_a_folder_that_does_not_exist_is_named(path: str) -> None:
    for pair in ({"target": path, "drafter": "auto"}, {"target": "t", "drafter": path}):
        with pytest.raises(DFlashError, match=f"there is no folder {path}"):
            flags.parse([], **pair)


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
        ("--disaggregation-mode decode --dp-size 2 --max-running-requests 64", 64),  # per replica
        ("--disaggregation-mode decode --dp-size 2 --enable-dp-attention --tp-size 2 --max-running-requests 64", 64),
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
