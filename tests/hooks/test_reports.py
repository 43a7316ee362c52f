"""A request's accept rate is over the drafts that were verified, whatever the widths were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dflash.hooks import reports

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    ("algorithm", "meta", "positions", "changed"),
    [
        ("DFLASH", {"spec_cap_length": 4.0}, 40, {"spec_accept_rate": 0.4, "spec_num_proposed_drafts": 30}),
        ("DFLASH", {"spec_cap_length": 1.0}, 10, {"spec_accept_rate": 0.0, "spec_num_proposed_drafts": 0}),
        ("DFLASH", {"spec_accept_rate": 0.08}, 40, {}),  # one width: SGLang counts right
        ("DSPARK", {"spec_cap_length": 4.0}, 40, {}),
    ],
)
def test_anchors_are_no_drafts(
    algorithm: str, meta: dict[str, Any], positions: int, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    received = SimpleNamespace(spec_num_cap_tokens=[positions], spec_verify_ct=[10], spec_num_correct_drafts=[12])
    found = dict(meta)
    reports.count_verified_drafts(None, None, found, received, 0)
    assert found == {**meta, **changed}
