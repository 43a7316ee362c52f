"""Every promise names tests that exist, and a bug that can be planted; the short tests of servers exist."""

from __future__ import annotations

import pytest

from tests.conftest import SHORT
from tests.promises import PACKAGE, PROMISES, ROOT, TESTS, Promise


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
def test_a_promise_has_tests_and_a_bug(promise: Promise) -> None:
    assert [each.name for each in PROMISES].count(promise.name) == 1
    assert "::test_" in promise.tests[0], "the bug needs a test"
    for test in promise.tests:
        path, _, name = test.partition("::")
        file = ROOT / TESTS / path
        text = "\n".join(each.read_text() for each in ([file] if path.endswith(".py") else file.rglob("*.py")))
        assert not name or f"def {name.partition('[')[0]}(" in text, test
    assert (ROOT / PACKAGE / promise.file).read_text().count(promise.old) == 1 and promise.old != promise.new


@pytest.mark.parametrize("name", SHORT)
def test_a_short_test_exists(name: str) -> None:
    """A new name, or a renamed file, would leave a mechanism out of `make test`."""
    file, _, test = name.partition("::")
    assert f"\ndef {test.partition('[')[0]}(" in (ROOT / file).read_text()
