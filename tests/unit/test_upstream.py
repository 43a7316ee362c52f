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
    for word in ("0.6.0", upstream.SUPPORTED_VERSIONS[-1], upstream.ALLOW_ANY_VERSION):
        assert word in str(caught.value)
    monkeypatch.setenv(upstream.ALLOW_ANY_VERSION, "1")
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
