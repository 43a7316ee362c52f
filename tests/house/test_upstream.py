"""The installed SGLang has every name that we use, and another one is refused in one message."""

from __future__ import annotations

import pickle

import pytest

from sglang_dflash import upstream
from sglang_dflash.errors import DFlashError
from tests.house.contract import SYMBOLS

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("path", sorted(SYMBOLS))
def test_a_symbol_exists_with_the_parameters_that_we_pass(path: str) -> None:
    assert SYMBOLS[path].problem() is None


def test_the_installed_version_is_supported_without_a_note() -> None:
    assert upstream.check_version() is None


@pytest.mark.parametrize("build", [".post1", ".dev3", "rc1", "+cu129", ".post2.dev7+gabc1234", "a1"])
def test_a_build_of_a_tested_release_is_accepted_with_a_note(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = upstream.TESTED_SGLANG
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: tested + build)
    assert upstream.check_version() == (
        f"treating SGLang {tested}{build} as {tested}, the release that this package is tested with"
    )


@pytest.mark.parametrize(
    "found", [None, "", "0.5.22.post1", "0.5.24.dev3", "0.5.24rc1", "0.5.230", "0.5.23.1", "1!0.5.23", "unknown"]
)
def test_a_build_of_another_release_is_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: found)
    with pytest.raises(DFlashError, match=found.replace("+", ".") if found else "not installed"):
        upstream.check_version()


def test_errors_keep_their_parts_between_processes() -> None:
    error = DFlashError("block_size 64", remedy="pass a smaller one")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is DFlashError
    assert (copy.problem, copy.remedy) == ("block_size 64", "pass a smaller one")
    assert str(copy) == str(error)
