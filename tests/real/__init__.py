"""A published model. ``make test-real`` installs and converts it; without it these tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

REAL = Path(__file__).parents[2] / ".cache" / "real"
MODEL = REAL / "SmolLM2-135M-Instruct"
MARKS = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="`make test-real` converts the model"),
]
