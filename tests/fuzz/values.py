"""Values that a file or a flag may hold, and what becomes of a real document that somebody spoilt.

Hypothesis draws values; plain code, a hundred times faster, puts them into documents (:class:`tests.fuzz.part.Part`).
"""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from hypothesis import strategies as st


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


# Far beyond what a parser's stack can take.
DEEP_TEXT = "[" * 100_000
INTEGERS = [
    *(-1, 0, 1, 2, 3, 16, 64, 2**15, 2**16, 2**20, 2**24, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**60, 2**63, 2**64),
    *(-(2**63), 10**9, 10**18, 10**400),
]
FLOATS = [0.0, -0.0, 0.25, 0.5, 1.0, -1.0, 1e-320, 5e-324, 1e-6, 1e30, 1e39, 1e308, *map(float, ("inf", "-inf", "nan"))]
TEXTS = [
    *("", " ", "16", "1e9", "auto", "null", "\x00", "\x1b[2J\x1b]0;x\x07", "\ud800", "\u202eevil", "a\nb", "x" * 500),
    *("../x", "/etc/passwd", "..", "~", "file:///etc/passwd", "http://localhost/", "$(id)", "%s%n", "{0}"),
]
HOSTILE: list[Any] = [
    *(None, True, False, *INTEGERS, *FLOATS, *TEXTS),
    *([], {}, [[]], [None], {"": None}, nested(50), [0] * 99, {"rope_type": "yarn"}, ["full_attention"] * 2),
]

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
WILD = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)

Path = tuple[Any, ...]


def pick(random: Random, drawn: list[Any]) -> Any:
    """A value that hypothesis has drawn, or a known bad one."""
    return copy.deepcopy(random.choice(drawn if random.random() < 0.4 else HOSTILE))


def places(document: Any, at: Path = ()) -> list[Path]:
    """Every key and index of a JSON document, the inner ones too."""
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    return [path for key in keys for path in [(*at, key), *places(document[key], (*at, key))]]


def spoil(random: Random, document: Any, keys: list[str], values: list[Any]) -> Any:
    """A document after one to three edits: a value replaced, a key dropped, or a known key put somewhere."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 2, 3))):
        known = places(document)
        if not known:
            break
        *outer, last = random.choice(known)
        place = document
        for key in outer:
            place = place[key]
        edit = random.choice(("replace", "replace", "drop", "add"))
        if edit == "drop":
            del place[last]
        elif edit == "add" and isinstance(place, dict):
            place[random.choice(keys)] = pick(random, values)
        else:
            place[last] = pick(random, values)
    return document


def dumped(document: Any) -> bytes:
    """As a file holds it: NaN and lone surrogates included, which Python reads."""
    return json.dumps(document).encode()


def damage(random: Random, whole: bytes) -> bytes:
    """A file cut short, lengthened, or with some bytes changed."""
    data = bytearray(whole)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        edit = random.choice(("set", "cut", "insert", "drop"))
        if edit == "set":
            data[at : at + 1] = random.randbytes(1)
        elif edit == "cut":
            del data[at:]
        elif edit == "insert":
            data[at:at] = random.randbytes(random.randrange(12))
        else:
            del data[at : at + random.randint(1, 9)]
    return bytes(data)
