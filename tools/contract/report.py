"""What changed, as Markdown: a verdict, what the user sees, one line for each name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten

from tools.contract.compare import BREAKS, CODE, UNKNOWN, Change


@dataclass(frozen=True)
class Result:
    """One release beside the tested one.

    Attributes:
        release, tested: versions.
        names: how many names were looked at.
        changes: those that differ.
        moved: path of a name that is gone -> modules that define it in the release.
        failed: why nothing could be looked at; None if it could.
        outcomes: command -> ``"starts"`` or its error, as a user sees it.
        patches: those that do not apply.
        packages: packages of the environment that the release wants in another version.
    """

    release: str
    tested: str
    names: int
    changes: Sequence[Change] = ()
    moved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    failed: str | None = None
    outcomes: Mapping[str, str] = field(default_factory=dict)
    patches: Sequence[str] = ()
    packages: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        return not self.failed and not any(change.kind in (BREAKS, UNKNOWN) for change in self.changes)


def verdict(result: Result) -> str:
    if result.failed:
        return f"**Not looked at**: {result.failed}"
    counts = Counter(change.kind for change in result.changes)
    if not counts:
        return f"**Fits**: all {result.names} names are as in {result.tested}."
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    if result.fits:
        return f"**Fits**, to be read before it is called tested: of {result.names} names {kinds}."
    return f"**Does not fit**: of {result.names} names {kinds}."


def markdown(result: Result) -> Iterator[str]:
    yield from (f"## SGLang {result.release} beside {result.tested}", "", verdict(result), "")
    yield from (
        f"- {command}: {shorten(outcome, 240, placeholder=' …')}" for command, outcome in result.outcomes.items()
    )
    yield from (f"- patch that does not apply: {patch}" for patch in result.patches)
    if result.packages:
        yield f"- looked at with packages it does not ask for: {'; '.join(result.packages)}"
    rows = [change for change in result.changes if change.kind != CODE or change.need.hooked]
    if rows:
        yield from ("", "| | name, below `sglang.` | change | needed for |", "|---|---|---|---|")
    for change in rows:
        places = result.moved.get(change.need.path, ())
        elsewhere = f"; that name is in {', '.join(places)}" if places else ""
        name, what = change.need.path.removeprefix("sglang."), f"{change.what}{elsewhere}".replace("|", "\\|")
        yield f"| {change.kind} | `{name}` | {what} | {change.need.use} |"
    called = [change.need.path for change in result.changes if change.kind == CODE and not change.need.hooked]
    if called:
        names = ", ".join(f"`{path.removeprefix('sglang.srt.')}`" for path in called)
        yield from ("", f"Other code behind the same parameters, in what is called and not replaced: {names}.")
