"""A request's accept rate is over the drafts that were verified, whatever the widths were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dflash.hooks import meta_info

pytestmark = pytest.mark.sglang


def counted(monkeypatch: pytest.MonkeyPatch, algorithm: str, meta: dict[str, Any], positions: int) -> dict[str, Any]:
    monkeypatch.setattr(meta_info, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    received = SimpleNamespace(spec_num_cap_tokens=[positions], spec_verify_ct=[10], spec_num_correct_drafts=[12])
    meta_info.count_verified_drafts(None, None, meta, received, 0)
    return meta


def test_anchors_are_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, "DFLASH", {"spec_cap_length": 4.0, "spec_accept_rate": 0.08}, 40)
    assert found == {"spec_cap_length": 4.0, "spec_accept_rate": 0.4, "spec_num_proposed_drafts": 30}


def test_a_request_that_was_decoded_plainly_had_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(monkeypatch, "DFLASH", {"spec_cap_length": 1.0}, 10)["spec_accept_rate"] == 0.0


@pytest.mark.parametrize(("algorithm", "meta"), [("DSPARK", {"spec_cap_length": 4.0}), ("DFLASH", {})])
def test_others_keep_sglangs_count(monkeypatch: pytest.MonkeyPatch, algorithm: str, meta: dict[str, Any]) -> None:
    assert counted(monkeypatch, algorithm, dict(meta), 40) == meta
