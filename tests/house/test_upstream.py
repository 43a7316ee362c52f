"""The seam refuses what it was not tested with, in one message."""

from __future__ import annotations

import pickle

import pytest

from sglang_dflash import upstream
from sglang_dflash.errors import DFlashError


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: "0.6.0")
    with pytest.raises(DFlashError) as caught:
        upstream.check_version()
    for word in ("0.6.0", upstream.TESTED_SGLANG, upstream.ALLOW_ANY_VERSION):
        assert word in str(caught.value)
    monkeypatch.setenv(upstream.ALLOW_ANY_VERSION, "1")
    upstream.check_version()


def test_the_tested_release_needs_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: upstream.TESTED_SGLANG)
    assert upstream.check_version() is None


@pytest.mark.parametrize("build", [".post1", ".dev3", "rc1", "+cu129", ".post2.dev7+gabc1234", "a1"])
def test_a_build_of_a_tested_release_is_accepted_with_a_note(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = upstream.TESTED_SGLANG
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: tested + build)
    assert upstream.check_version() == (
        f"SGLang {tested}{build} is taken for {tested}, the release that this package is tested with"
    )


@pytest.mark.parametrize(
    "found", [None, "", "0.5.22.post1", "0.5.24.dev3", "0.5.24rc1", "0.5.230", "0.5.23.1", "1!0.5.23", "unknown"]
)
def test_a_build_of_another_release_is_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: found)
    with pytest.raises(DFlashError, match=found.replace("+", ".") if found else "not installed"):
        upstream.check_version()


def test_a_missing_symbol_and_a_missing_parameter_are_both_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = upstream.Symbol("json.decode_everything")
    changed = upstream.Symbol("json.dumps", ("obj", "colour"))
    fine = upstream.Symbol("json.loads", ("s",))
    monkeypatch.setattr(upstream, "SYMBOLS", {"fine": fine, "gone": gone})
    with pytest.raises(DFlashError) as caught:
        upstream.check_symbols([changed])
    assert "json.decode_everything: not found" in str(caught.value)
    assert "['colour']" in str(caught.value)
    assert "json.loads" not in str(caught.value)


def test_a_name_outside_the_table_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="add it to SYMBOLS"):
        upstream.NoSuchThing  # noqa: B018


def test_errors_keep_their_parts_between_processes() -> None:
    error = DFlashError("block_size 64", expected="2 to 32", remedy="pass a smaller one")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.value, copy.expected, copy.remedy) == ("block_size 64", "2 to 32", "pass a smaller one")
    assert str(copy) == str(error)
