"""Every SGLang name we use exists in the installed release, with the parameters that we pass."""

from __future__ import annotations

import pytest

from sglang_dflash import upstream
from sglang_dflash.cpu.replacements import TABLE

pytest.importorskip("sglang")


@pytest.mark.parametrize("name", sorted(upstream.SYMBOLS))
def test_symbol(name: str) -> None:
    assert upstream.SYMBOLS[name].problem() is None


@pytest.mark.parametrize("method", upstream.METHODS, ids=lambda method: ".".join(method.path.rsplit(".", 2)[1:]))
def test_method(method: upstream.Symbol) -> None:
    assert method.problem() is None


def test_installed_version_is_supported() -> None:
    upstream.check_version()
    upstream.check_symbols(row.target for row in TABLE)
