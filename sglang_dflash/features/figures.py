"""Figures of a scheduler by name: one table with two outputs, ``/server_info`` and SGLang's ``/metrics``."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from sglang.srt.runtime_context import get_observability, get_parallel, get_serving


class Series(NamedTuple):
    """A Prometheus series of a figure; with ``label``, one per key."""

    figure: str
    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    label: str = ""


STEPS, BLOCKS, BROKEN, PAYS = "steps_by_width", "blocks_by_accept_length", "broken_drafts", "drafting_pays"
COPIED_BLOCKS, COPIED_TOKENS = "copied_blocks_by_match_length", "copied_tokens"
RATE, SURVIVAL = "tokens_per_ms", "survival"
# in ``/server_info``, by key and as one number
COUNTED, TOTALS = (STEPS, BLOCKS, COPIED_BLOCKS), (COPIED_TOKENS, BROKEN)
SERIES = (
    Series(BLOCKS, "histogram", "accept_length", "New tokens per verified block: accepted drafts and the bonus token."),
    Series(STEPS, "histogram", "width", "Positions of a step's block; 1 is plain decoding."),
    Series(STEPS, "counter", "steps", "Decode steps.", "width"),
    # "measured": the last timed step; "predicted": the last launched step
    Series(RATE, "gauge", RATE, "Tokens of a decode step over its milliseconds.", "kind"),
    Series(SURVIVAL, "gauge", SURVIVAL, "Chance that the draft at a position is committed.", "position"),
    Series(PAYS, "gauge", PAYS, "0 while drafting does not pay, else 1."),
    Series(BROKEN, "gauge", BROKEN, "Drafted positions at which the drafter's output was not finite."),
    Series(COPIED_BLOCKS, "histogram", "match_length", "Tokens of a copied block's match."),
    Series(COPIED_TOKENS, "counter", COPIED_TOKENS, "Accepted tokens that copies added."),
)


class Figures:
    """Filled by the features of one scheduler.

    ``exported`` is whether series exist: on one rank per replica, with ``--enable-metrics``. ``most`` is the last
    bucket of each histogram.
    """

    def __init__(self, most: int) -> None:
        self.counts, self.totals = {name: Counter[int]() for name in COUNTED}, dict.fromkeys(TOTALS, 0)
        self._outputs = defaultdict[str, list[Callable[[Any, float], None]]](list)
        self.exported = get_observability().enable_metrics and get_parallel().attn_tp_rank == 0
        if self.exported:
            for series in SERIES:
                self._outputs[series.figure].append(_exporter(series, most))

    def count(self, name: str, keys: Sequence[int]) -> None:
        self.counts[name].update(keys)
        if self.exported:
            for key in keys:
                self._export(name, key, 1)

    def add(self, name: str, number: int) -> None:
        self.totals[name] += number
        self._export(name, "", number)

    def set(self, name: str, number: float, key: Any = "") -> None:
        if name in self.totals:
            self.totals[name] = int(number)
        self._export(name, key, number)

    def info(self) -> dict[str, Any]:
        by_key = {
            name: {str(key): number for key, number in sorted(counts.items())} for name, counts in self.counts.items()
        }
        return {**by_key, **self.totals}

    def _export(self, name: str, key: Any, number: float) -> None:
        for output in self._outputs[name]:
            output(key, number)


def _exporter(series: Series, most: int) -> Callable[[Any, float], None]:
    # at import the client reads the variable that SGLang sets for shared series
    from prometheus_client import Counter, Gauge, Histogram

    labels = {"model_name": get_serving().served_model_name, "dp_rank": str(get_parallel().dp_rank or 0)}
    name, by = f"sglang_dflash:{series.name}", (series.label,) if series.label else ()
    if series.kind == "histogram":
        lengths = Histogram(name, series.text, tuple(labels), buckets=range(1, most + 1)).labels(**labels)
        return lambda key, number: lengths.observe(key)
    found: Any
    if series.kind == "gauge":
        found, change = Gauge(name, series.text, (*labels, *by), multiprocess_mode="mostrecent"), "set"
    else:
        found, change = Counter(name, series.text, (*labels, *by)), "inc"
    if not by:
        alone = getattr(found.labels(**labels), change)
        return lambda key, number: alone(number)
    return lambda key, number: getattr(found.labels(**labels, **{series.label: key}), change)(number)
