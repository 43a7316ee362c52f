"""Which way to keep states a server will take, from its flags."""

from __future__ import annotations

import pytest

from sglang_dflash.check.flags import parse
from sglang_dflash.errors import DFlashError

SWITCH = "SGLANG_DFLASH_STATE_REPLAY"
FLAG = "--enable-linear-replayssm-spec"


@pytest.mark.parametrize(
    ("flags", "switch", "expected"),
    [
        ([], None, True),
        ([FLAG], None, True),
        ([], "1", True),
        ([], "0", False),
        (["--linear-attn-backend", "cutedsl"], None, False),
        (["--linear-attn-backend", "cutedsl", "--linear-attn-decode-backend", "flashinfer"], None, True),
        (["--enable-linear-replayssm"], None, False),
        (["--disaggregation-mode", "prefill"], None, False),
    ],
)
def test_states_are_replayed_wherever_they_can_be(
    flags: list[str], switch: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    assert parse(flags, target="t", drafter="d")[0].replays_states == expected


@pytest.mark.parametrize(("flags", "block", "expected"), [([], 16, 16), ([], 4, 16), ([], 17, 32), (["64"], 16, 64)])
def test_a_block_fits_its_records(flags: list[str], block: int, expected: int) -> None:
    args = parse([part for value in flags for part in ("--linear-replayssm-cache-len", value)], target="t", drafter="d")
    assert args[0].record_length(block) == expected


@pytest.mark.parametrize("asked", ["8", "48"])
def test_records_that_are_too_few_or_no_power_of_two_are_refused(asked: str) -> None:
    args = parse(["--linear-replayssm-cache-len", asked], target="t", drafter="d")[0]
    with pytest.raises(DFlashError, match="a power of two, at least 16 for blocks of 16"):
        args.record_length(16)


@pytest.mark.parametrize(
    ("flags", "switch", "said"),
    [
        ([FLAG], "0", "one of them"),
        ([], "yes", "0, 1, or unset"),
        (["--linear-attn-backend", "cutedsl"], "1", "a server that can replay states"),
    ],
)
def test_a_contradiction_or_an_unknown_word_is_refused(
    flags: list[str], switch: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    with pytest.raises(DFlashError, match=said):
        settings = parse(flags, target="t", drafter="d")[0]
        settings.validate()
        settings.replay_choice  # noqa: B018
