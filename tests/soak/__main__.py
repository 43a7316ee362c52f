"""The command: see the package."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tests.serving.matrix import Record
from tests.soak.catalogue import HOSTILE, SEEDED, Entry, catalogue
from tests.soak.load import PATIENCE, Load, Outcome, drive, played
from tests.soak.rows import ROWS, TAILS, Row, Served, alone
from tests.soak.verdict import Known, Promise, Rest, is_right, promises, text, versions_of, wrong_answers
from tests.support.servers import FEATURES, dflash_server, running, worker_info

ENTRIES = 320
AT_A_TIME = 8  # of the reference's answers
HELD = 60.0  # seconds; SGLang holds the slots of a transfer whose peer died for 30


def soak(row: Row, out: Path, share: float = 1.0, entries: int = ENTRIES) -> list[Promise]:
    """Send the row's requests, judge the answers, and write the report to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    requests = max(round(row.requests * share), 1)
    asked, record = catalogue(min(entries, requests), row.kinds, row.pair), Record(out / "finished.jsonl")
    name = f"reference of {len(asked)} entries"
    if name not in record.results():
        record.add(name, asyncio.run(answers_of_reference(row, asked, out)))
    known = record.results()[name]
    if "oracle" in row.plugin:
        pairs = zip(asked, known[0], strict=True)
        (out / "answers.json").write_text(json.dumps([[*each.body["input_ids"], *answer] for each, answer in pairs]))
    with (row.servers or alone)(row, out) as served:
        load = asyncio.run(drive(served, row, asked, requests, record))
        rest = at_rest(row, served)
    wrong = wrong_answers(load, asked, known)
    if row.versions > 1 and wrong:
        wrong = asyncio.run(not_continued(row, out, load, wrong, asked, known))
    found = list(promises(row, load, asked, wrong, rest))
    (out / "soak.md").write_text(text(row, share, load, asked, found))
    shown = [
        {**asdict(each), "asked": asdict(asked[each.entry]), "expected": [version[each.entry] for version in known]}
        for each in wrong
    ]
    (out / "wrong.json").write_text(json.dumps(shown, indent=1))
    return found


@contextmanager
def plain(row: Row, out: Path) -> Iterator[Served]:
    target, _ = row.arguments(out)
    with running(out, *target, "--disable-radix-cache") as server:
        yield Served(server.url, [server], row.weights(out))


async def answers_of_reference(row: Row, entries: Sequence[Entry], out: Path) -> list[list[Any]]:
    """Return plain decoding's answers for each version of the target.

    With a seed, which SGLang ignores outside deterministic mode, those of our worker at width 1.
    """
    steps_of_one, slots = out / "widths.json", asyncio.Semaphore(AT_A_TIME)
    steps_of_one.write_text(json.dumps({"widths": [1]}))
    seeded = ("--speculative-adaptive", "--speculative-adaptive-config", str(steps_of_one))
    async with AsyncExitStack() as stack:
        served = stack.enter_context(plain(row, out))
        ours = served.url
        if SEEDED in row.kinds:
            ours = stack.enter_context(dflash_server(row.pair, out, *seeded, base=FEATURES, block=2)).url
        theirs, one = (httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) for url in (served.url, ours))
        for http in (theirs, one):
            await stack.enter_async_context(http)

        async def answer(entry: Entry) -> Any:
            async with slots:
                there = one if entry.kind == SEEDED else theirs
                return None if entry.kind == HOSTILE else await played(there, entry, {})

        found = []
        for version in range(row.versions):
            if version:
                await served.become(theirs, version)
            found.append(await asyncio.gather(*map(answer, entries)))
        return found


async def not_continued(
    row: Row, out: Path, load: Load, wrong: list[Outcome], entries: Sequence[Entry], known: Known
) -> list[Outcome]:
    """Return the wrong answers but those that begin as one version's and go on as the next one's, as after a pause."""
    left, mixed = [], list[tuple[int, int, Outcome]]()
    for outcome in wrong:
        served = versions_of(outcome, load.events)
        mixed += [(served[1], served[0], outcome)] if len(served) == 2 else []
        left += [outcome] if len(served) != 2 else []
    with plain(row, out) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, trust_env=False) as http:
            for version, before, outcome in sorted(mixed, key=lambda each: each[0]):
                if version != server.version:
                    await server.become(http, version)
                body, answer, begun = entries[outcome.entry].body, outcome.answer, known[before][outcome.entry]
                same = len(os.path.commonprefix([answer, begun]))
                params = body["sampling_params"]
                rest = {**params, "max_new_tokens": params["max_new_tokens"] - same}
                changed = {"input_ids": [*body["input_ids"], *answer[:same]], "sampling_params": rest}
                following = await played(http, replace(entries[outcome.entry], body=changed), {})
                left += [] if is_right(outcome, [*answer[:same], *following]) else [outcome]
    return left


def at_rest(row: Row, served: Served) -> Rest:
    """Read what is lost once nothing runs, and how often what the row wanted to happen did."""
    deadline = time.monotonic() + HELD
    while any((lost := lost_slots(served)).values()) and time.monotonic() < deadline:
        time.sleep(1)
    happened = {each: sum(len(re.findall(each, server.log)) for server in served.servers) for each in row.short}
    if TAILS in happened:
        happened[TAILS] = worker_info(served.servers[0])["tails"]["evicted"]
    return Rest(lost, happened)


def lost_slots(served: Served) -> Counter[str]:
    lost = Counter[str]()
    for server in served.servers:
        assert server.get("/health_generate").status_code == 200
        for state in server.get("/server_info").json()["internal_states"]:
            lost.update(state["pools"])
    return lost


def main(
    rows: Annotated[list[str] | None, typer.Argument(help="Names or beginnings of names; default: all.")] = None,
    share: Annotated[float, typer.Option(help="Share of each row's requests.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder of the reports and the servers' logs.")] = Path("results/soak"),
) -> None:
    """Exit code 1 if a promise was broken."""
    names = tuple(rows or [""])
    asked = [row for row in ROWS if row.name in names] or [row for row in ROWS if row.name.startswith(names)]
    assert asked, f"no row of {[row.name for row in ROWS]} begins with {rows}"
    held = True
    for row in asked:
        folder = out / re.sub(r"\W+", "-", row.name)
        held &= all(promise.held for promise in soak(row, folder, share))
        typer.echo((folder / "soak.md").read_text())
    sys.exit(not held)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
