"""The published figures of a drafter."""

from __future__ import annotations

import pytest

from sglang_dflash.diagnose.verdict import find_reference as find
from sglang_dflash.diagnose.verdict import other_target
from sglang_dflash_lab.pairs import drafter_path


def test_a_published_drafter_is_recognised_by_the_end_of_its_path() -> None:
    found = find("/models/Qwen3.5-4B-DFlash", 15)
    assert found is not None and found == find("z-lab/Qwen3.5-4B-DFlash", 16)
    assert found.thinking and found.block == 16 and "huggingface.co" in found.source
    assert found.lengths == pytest.approx({"math": (6.748 + 7.478) / 2, "code": (7.719 + 6.527) / 2, "chat": 5.933})


def test_a_card_without_figures_and_an_unknown_drafter_have_none() -> None:
    unmeasured = find("z-lab/Qwen3.6-27B-DFlash", 16)
    assert unmeasured is not None and not unmeasured.lengths
    assert find("someone/drafter", 16) is None


def test_a_tiny_pairs_drafter_has_its_stored_figures() -> None:
    found = find(str(drafter_path("tiny-hybrid", "weak")), 8)
    assert found is not None and found.block == 8 and not found.thinking
    assert found.lengths == {"math": 2.72, "code": 2.83, "json": 2.98, "chat": 2.4}


def test_a_drafter_of_another_published_target_is_recognised_by_name() -> None:
    assert other_target("z-lab/Qwen3.5-4B-DFlash", "/models/Qwen3.5-27B") == "Qwen/Qwen3.5-4B"
    assert other_target("z-lab/Qwen3.5-4B-DFlash", "Qwen/Qwen3.5-4B") is None
    assert other_target("z-lab/Qwen3.5-4B-DFlash", "/models/mine") is None
