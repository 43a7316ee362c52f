"""The dashboard shows all our series, and its queries select the chosen replicas.

Servers show that they export what it asks for: ``tests/width/test_width_engine.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "dflash.json"
OURS, SGLANGS, ROUTERS = "sglang_dflash:", "sglang:", "smg_"
_SERIES = re.compile(rf"\b(?:{OURS}|{SGLANGS}|{ROUTERS})\w+")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Without the rows' headings."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Title of the panel and PromQL, with every replica and router chosen."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], re.sub(r"\$(instance|router)", ".*", target["expr"])


def series(*families: str) -> set[str]:
    """Names of all series of these families, as ``/metrics`` spells them: of panels, and of the choice above them."""
    variables = [variable["query"]["query"] for variable in dashboard()["templating"]["list"][1:]]
    texts = [*(query for _, query in queries()), *variables]
    return {name for text in texts for name in _SERIES.findall(text) if name.startswith(families)}


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
