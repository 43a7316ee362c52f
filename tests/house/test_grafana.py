"""The dashboard is one that Grafana would read, and it has every series of ours.

Servers show that they export what it asks for: ``tests/width/test_width_engine.py`` and ``test_replicas.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support.grafana import OURS, dashboard, queries, series

METRICS = Path(__file__).parents[2] / "sglang_dflash/worker/observe/metrics.py"


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """What of one JSON value the other lacks or has otherwise; what it has beside does not matter."""
    if isinstance(before, dict) and isinstance(after, dict):
        missing = [f"{path}/{key}" for key in before if key not in after]
        return missing + [p for key in before if key in after for p in lost(before[key], after[key], f"{path}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [p for i, (x, y) in enumerate(zip(before, after, strict=True)) for p in lost(x, y, f"{path}/{i}")]
    return [] if before == after else [path]


def test_grafanas_own_schema_knows_every_key() -> None:
    """The foundation SDK is generated from Grafana's schema: reading drops what that does not have."""
    plugins.register_default_plugins()
    read = json.loads(json.dumps(Dashboard.from_json(dashboard()), cls=JSONEncoder))
    assert lost(dashboard(), read) == []


def test_every_series_of_ours_is_shown() -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series(OURS)}
    text = METRICS.read_text()
    counters = {f"{name}_total" for name in re.findall(r'Counter\(\s*"(\S+)"', text)}
    others = {f"{OURS}{name}" for name in re.findall(r'(?:gauge|histogram)\(\s*"(\w+)"', text)}
    assert shown == counters | others


def test_every_query_keeps_to_the_chosen_replicas() -> None:
    for title, query in queries():
        chosen = re.findall(r"[\w:]+\{(.*?)\}", query)
        assert chosen and all(labels == 'instance=~".*"' for labels in chosen), title
