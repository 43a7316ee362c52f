"""The dashboard shows all our series, and its queries select the chosen replicas.

Servers show that they export what it asks for: ``tests/width/test_width_engine.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang_dflash.features.figures import SERIES

pytestmark = pytest.mark.sglang

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "dflash.json"
OURS, SGLANGS, ROUTERS = "sglang_dflash:", "sglang:", "smg_"
_SERIES = re.compile(rf"\b(?:{OURS}|{SGLANGS}|{ROUTERS})\w+")


DASHBOARD = json.loads(FILE.read_text())
# PromQL of every panel that is no heading of a row.
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def series(*families: str) -> set[str]:
    """Names of all series of these families, as ``/metrics`` spells them: of panels, and of the choice above them."""
    texts = QUERIES + [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"][1:]]
    return {name for text in texts for name in _SERIES.findall(text) if name.startswith(families)}


def test_every_series_of_ours_is_shown() -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series(OURS)}
    assert shown == {f"{OURS}{each.name}{'_total' if each.kind == 'counter' else ''}" for each in SERIES}


def test_every_query_keeps_to_the_chosen_replicas() -> None:
    for query in QUERIES:
        chosen = re.findall(r"[\w:]+\{(.*?)\}", query)
        assert chosen and all(re.fullmatch(r'instance=~"\$(instance|router)"', labels) for labels in chosen), query
