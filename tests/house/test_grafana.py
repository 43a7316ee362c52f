"""The dashboard shows all our series, and its queries select the chosen replicas.

Servers show that they export what it asks for: ``tests/width/test_width_engine.py`` and ``test_replicas.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.grafana import OURS, queries, series

METRICS = Path(__file__).parents[2] / "sglang_dflash/worker/telemetry.py"


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
