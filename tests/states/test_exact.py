"""Exact verify and commit: with SGLang's kernel under Triton's interpreter, and with the CPU platform's function."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from tests.ops.launches import interpreted
from tests.states.exact_cases import exact, test_replayed

__all__ = ("exact", "test_replayed")
pytestmark = pytest.mark.sglang


@pytest.mark.slow
def test_sglangs_kernels_are_exact_under_the_interpreter() -> None:
    interpreted("states/exact_cases.py")
