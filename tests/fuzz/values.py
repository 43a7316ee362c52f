"""Strategies for hostile values, and for damaged documents and files."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))  # of each property; `make fuzz` sets it
settings.register_profile("fuzz", deadline=None, database=None, suppress_health_check=list(HealthCheck))
fuzz = settings(settings.get_profile("fuzz"), max_examples=EXAMPLES or 50, derandomize=not EXAMPLES)

NAN, INF, HUGE = float("nan"), float("inf"), 1 << 60
DEEP, LONG_NUMBER = "[" * 100_000, "1" + "0" * 5000
INTEGERS = [-(2**63), -1, 0, 1, 2, 16, 2**15, 2**20, 2**31 - 1, 2**31, 2**32, 2**53 + 1, HUGE, 2**63, 2**64, 10**400]
FLOATS = [0.0, -0.0, 0.5, 1.0, 5e-324, 1e-6, 1e30, 1e39, 1e308, INF, -INF, NAN]
TEXTS = ["", "16", "auto", "\0", "\x1b[2J\x1b]0;x\7", "\ud800", "\u202eevil", "a\nb", "x" * 500, "/etc/passwd", "$(id)"]
NESTED: list[Any] = [[], {}, [None], {"": None}, [[[[[[[[[[]]]]]]]]]], [0] * 99, {"rope_type": "yarn"}]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.sampled_from([None, True, False, *INTEGERS, *FLOATS, *TEXTS, *NESTED]) | st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
KINDS = st.sampled_from(["replace", "replace", "drop", "add"])


def spoilt(documents: Sequence[Any], values: SearchStrategy[Any] = VALUES) -> SearchStrategy[Any]:
    """One of ``documents`` after up to three edits: a value replaced, a key dropped, a known key put somewhere else."""
    keys = st.sampled_from(sorted({str(key) for each in documents for _, key in _places(each)}))
    edits = st.lists(st.tuples(st.integers(0, 999), KINDS, keys, values), max_size=3)
    return st.builds(_edited, st.sampled_from(documents), edits)


def _edited(document: Any, edits: list[tuple[int, str, str, Any]]) -> Any:
    document = copy.deepcopy(document)
    for number, kind, key, value in edits:
        if places := list(_places(document)):
            place, last = places[number % len(places)]
            place[key if kind == "add" and isinstance(place, dict) else last] = copy.deepcopy(value)
            if kind == "drop":
                del place[last]
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Container and key or index of every value in a JSON document."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in list(inner):
        yield document, key
        yield from _places(value)


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


def damaged(whole: bytes) -> SearchStrategy[bytes]:
    """A file of which one part is missing, repeated or replaced."""
    places = st.integers(0, len(whole))
    return st.builds(lambda end, start, new: whole[:end] + new + whole[start:], places, places, st.binary(max_size=8))


def json_files(documents: Sequence[Any], values: SearchStrategy[Any] = VALUES) -> SearchStrategy[bytes]:
    """A spoilt document as a file, a damaged one, or text that is hardly JSON."""
    wild = st.sampled_from([b"", b"\xff{}", b'{"a":' * 5000, LONG_NUMBER.encode(), DEEP.encode()]) | VALUES.map(dumped)
    return spoilt(documents, values).map(dumped) | damaged(dumped(documents[0])) | wild
