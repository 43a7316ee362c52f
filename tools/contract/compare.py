"""What differs between two releases in what this package needs: from two sets of :class:`Seen` to named changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tools.contract.probe import Need, Seen

BREAKS, UNKNOWN, LOST, INTERFACE, CODE = "breaks", "not seen", "attributes", "parameters", "code"


@dataclass(frozen=True)
class Change:
    """One name that is not what it was.

    Attributes:
        kind: ``"breaks"``: a server refuses this release, or would fail; ``"not seen"``: its module cannot be imported
            in this environment; ``"attributes"``: a type lost names that stand behind a dot somewhere in this package;
            ``"parameters"``: what we pass is still there, the rest differs; ``"code"``: only the code differs.
    """

    kind: str
    need: Need
    what: str


def compare(
    needs: Iterable[Need], before: Mapping[str, Seen], after: Mapping[str, Seen], read: set[str]
) -> list[Change]:
    """All changes, the worst first.

    Args:
        read: names of attributes that this package reads, of whatever object.
    """
    found = [change for need in needs for change in changes(need, before[need.path], after[need.path], read)]
    return sorted(found, key=lambda change: (BREAKS, UNKNOWN, LOST, INTERFACE, CODE).index(change.kind))


def changes(need: Need, before: Seen, after: Seen, read: set[str]) -> Iterator[Change]:
    if after.unimportable:
        yield Change(UNKNOWN, need, f"cannot be imported here ({after.unimportable})")
        return
    if after.problem:
        yield Change(BREAKS, need, after.problem.removeprefix(f"{need.path}: "))
        return
    if lost := sorted((set(before.attributes) - set(after.attributes)) & read):
        yield Change(LOST, need, f"lost {', '.join(lost)}")
    old, new = before.parameters or (), after.parameters or ()
    if missed := [name for name in after.required if name not in (*old, *need.params)]:
        yield Change(BREAKS if need.params else INTERFACE, need, f"cannot be called without {', '.join(missed)}")
    elif old != new:
        yield Change(INTERFACE, need, difference(old, new))
    elif before.code != after.code:
        yield Change(CODE, need, "other code")


def difference(old: tuple[str, ...], new: tuple[str, ...]) -> str:
    added, gone = [name for name in new if name not in old], [name for name in old if name not in new]
    parts = [f"new: {few(added)}"] * bool(added) + [f"gone: {few(gone)}"] * bool(gone)
    return "; ".join(parts) or f"in another order: {', '.join(new)}"


def few(names: list[str], most: int = 6) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
