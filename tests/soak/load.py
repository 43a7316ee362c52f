"""The load: bursts of drawn requests, each with a fate, while something happens and samples of the servers are taken.

A finished burst is recorded, so that an interrupted load goes on with the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tests.serving.matrix import Record
from tests.soak.catalogue import HOSTILE, RESPONSES, SAID, SEEDED, Entry
from tests.support.chats import seen

if TYPE_CHECKING:
    from tests.soak.rows import Row, Served

WHOLE, STREAMED, ABORTED, VANISHED = "whole", "streamed", "aborted", "vanished"
FATES = {WHOLE: 0.4, STREAMED: 0.4, ABORTED: 0.1, VANISHED: 0.1}
BURST = 60  # requests
AT_ONCE = (1, 4, 8, 16, 32)  # up to four times as many as the server runs
SPEED_ROUNDS = 12
SPEED_REQUESTS, SPEED_AT_ONCE = 24, 8
SAMPLE_SECONDS = 1.0
PATIENCE = 600.0  # seconds after which a request hangs


@dataclass
class Outcome:
    """The result of a request.

    Attributes:
        entry: its number in the catalogue.
        answer: as ``answer_of`` returns it; of an interrupted stream, what arrived.
        complete: whether the server ended the answer.
        error: what the client did not expect.
        began, ended: seconds since the epoch.
    """

    entry: int
    fate: str
    answer: Any
    complete: bool
    error: str | None = None
    began: float = 0.0
    ended: float = 0.0


class Refused(Exception):
    """An answer that is none."""


async def ask(
    http: httpx.AsyncClient, entry: Entry, number: int, fate: str, random: Random, more: dict[str, Any]
) -> Outcome:
    """Send ``entry`` with ``more`` keys, and abort it or drop its connection if that is its fate."""
    if entry.kind == HOSTILE:  # any answer will do
        text = json.dumps({**entry.body, **more})
        await http.post(entry.route, content=text, headers={"Content-Type": "application/json"})
        return Outcome(number, WHOLE, None, False)
    if entry.route != "/generate" or entry.turns or fate == WHOLE:
        return Outcome(number, WHOLE, await played(http, entry, more), True)
    rid = f"soak-{random.getrandbits(64):x}"
    if fate == STREAMED:
        return await _stream(http, entry, number, fate, {**more, "rid": rid})
    delay = random.random() ** 2
    if fate == VANISHED:
        found = Outcome(number, fate, [], False)
        with contextlib.suppress(TimeoutError):
            found = await asyncio.wait_for(_stream(http, entry, number, fate, {**more, "rid": rid}), delay)
        return found
    asked = asyncio.create_task(_stream(http, entry, number, fate, {**more, "rid": rid}))
    await asyncio.sleep(delay)
    (await http.post("/abort_request", json={"rid": rid})).raise_for_status()
    return await asked


async def played(http: httpx.AsyncClient, entry: Entry, more: dict[str, Any]) -> Any:
    """Return the answer of an entry, in JSON; of one with turns all answers, each turn with the conversation so far."""
    if not entry.turns:
        return answer_of(entry, await _post(http, entry.route, {**entry.body, **more}))
    body, answers = {**entry.body, **more}, []
    in_session = "session_params" in body
    if in_session:
        opened = await _post(http, "/open_session", {"capacity_of_str_len": 100000})
        body["session_params"] = {"id": opened.json()}
    for turn in (*entry.turns, None):
        answer = (await _post(http, entry.route, body)).json()
        said = answer["output_ids"] if in_session else SAID[entry.route](answer)
        answers.append(said)
        if in_session:
            body["session_params"]["rid"] = answer["meta_info"]["id"]
            body["input_ids"] = turn
        else:
            log = "input" if entry.route == RESPONSES else "messages"
            text = "".join(said) if entry.route == RESPONSES else said
            body[log] = [*body[log], {"role": "assistant", "content": text}, {"role": "user", "content": turn}]
    if in_session:
        await _post(http, "/close_session", {"session_id": body["session_params"]["id"]})
    return answers


async def _post(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> httpx.Response:
    response = await http.post(route, json=body)
    if response.status_code != 200:
        raise Refused(f"{response.status_code}: {response.text[:300]}")
    if route == "/generate" and response.json()["meta_info"]["finish_reason"]["type"] == "abort":
        raise Refused(f"aborted: {response.json()['meta_info']['finish_reason']}")
    return response


def answer_of(entry: Entry, response: httpx.Response) -> Any:
    """Token ids; of a chat what its client sees."""
    answer = response.json()["output_ids"] if entry.route == "/generate" else seen(response)
    return json.loads(json.dumps(answer))


async def _stream(http: httpx.AsyncClient, entry: Entry, number: int, fate: str, more: dict[str, Any]) -> Outcome:
    found = Outcome(number, fate, [], False)
    body = {**entry.body, "stream": True, **more}
    async with http.stream("POST", entry.route, json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event or "meta_info" not in event:
                found.error = None if fate == ABORTED else line[:300]
                return found
            reason = event["meta_info"]["finish_reason"]
            if reason is not None and reason["type"] == "abort":
                # Its tokens do not count: SGLang does not cut the block at the answer's end then, and returns the token
                # after an empty prompt for a request whose grammar is still being compiled.
                break
            found.answer, found.complete = event["output_ids"], reason is not None
    if not found.complete and fate == STREAMED:
        found.error = f"the stream ended with status {response.status_code} before its answer did"
    return found


@dataclass(frozen=True)
class Sample:
    """The servers at one moment: MiB of all their processes, share of K/V in use, the worst ``/health``.

    ``start`` is the start of the servers, ``at`` this moment, both in seconds since the epoch.
    """

    rss: float
    kv_usage: float
    health: int
    start: float
    at: float


@dataclass(frozen=True)
class Happened:
    """An event; the target has the weights of ``version`` after it."""

    name: str
    began: float
    ended: float
    version: int


@dataclass
class Load:
    """Results of the whole load.

    Attributes:
        speeds: tokens per second of the same requests, spread evenly over the run.
        among: those among as many hostile ones.
        seconds: of the whole load.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[Happened] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    among: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, part: dict[str, Any]) -> None:
        for name, kind in (("outcomes", Outcome), ("samples", Sample), ("events", Happened)):
            getattr(self, name).extend(kind(**each) for each in part[name])
        self.speeds += part["speeds"]
        self.among += part["among"]
        self.seconds += part["seconds"]


def bursts_of(row: Row, requests: int) -> list[int]:
    """Sizes of the bursts: every event happens at least once, in every second burst."""
    number = max(-(-requests // BURST), 2 * len(row.events), 1)
    return [requests * (i + 1) // number - requests * i // number for i in range(number)]


async def drive(served: Served, row: Row, entries: Sequence[Entry], requests: int, record: Record) -> Load:
    """Draw and send ``requests`` of the catalogue while the row's events happen in turn."""
    load, sizes, started = Load(), bursts_of(row, requests), time.time()
    finished, events = record.results(), [*row.events]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE, limits=limits, trust_env=False) as http:
        for burst, size in enumerate(sizes):
            name = f"burst {burst} of {len(sizes)}, {requests} requests"
            if name not in finished:
                part, random, begun = Load(), Random(f"{row.name} {burst}"), time.time()
                watch = asyncio.create_task(_watch(served, http, part, started))
                if row.long and burst * SPEED_ROUNDS // len(sizes) != (burst - 1) * SPEED_ROUNDS // len(sizes):
                    await served.flush(http)
                    part.speeds.append(await speed(http, entries))
                done = asyncio.create_task(_burst(http, row, entries, size, random, part))
                if burst % 2 and events:
                    event = events[burst // 2 % len(events)]
                    came = time.time()
                    await event(served, http, done, entries, part)
                    part.events.append(Happened(event.__name__, came, time.time(), served.version))
                await done
                watch.cancel()
                part.seconds = time.time() - begun
                record.add(name, asdict(part))
                finished[name] = asdict(part)
            elif row.versions > 1 and finished[name]["events"]:
                await served.become(http, finished[name]["events"][-1]["version"])
            load.add(finished[name])
    return load


async def _burst(
    http: httpx.AsyncClient, row: Row, entries: Sequence[Entry], size: int, random: Random, load: Load
) -> None:
    slots = asyncio.Semaphore(random.choice(row.at_once))

    async def one(number: int, fate: str, own: Random) -> None:
        async with slots:
            began = time.time()
            try:
                found = await ask(http, entries[number], number, fate, own, row.more(own))
            except (httpx.TransportError, Refused) as error:
                found = Outcome(number, fate, None, False, f"{type(error).__name__}: {error}")
            found.began, found.ended = began, time.time()
            load.outcomes.append(found)

    fates = random.choices(list(row.fates), list(row.fates.values()), k=size)
    await asyncio.gather(*(one(random.randrange(len(entries)), fate, Random(random.random())) for fate in fates))


async def speed(http: httpx.AsyncClient, entries: Sequence[Entry], among: Sequence[Entry] = ()) -> float:
    """Return tokens per second of the catalogue's first greedy prompts at one length, among as many others."""
    plain = [each for each in entries if "input_ids" in each.body and each.kind not in (SEEDED, HOSTILE)]
    slots = asyncio.Semaphore(SPEED_AT_ONCE * (1 + bool(among)))
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}

    async def one(entry: Entry) -> int:
        async with slots:
            if entry.kind == HOSTILE:
                await ask(http, entry, 0, WHOLE, Random(0), {})
                return 0
            body = {"input_ids": entry.body["input_ids"], "sampling_params": params}
            return len((await http.post("/generate", json=body)).json()["output_ids"])

    pairs = zip(plain[:SPEED_REQUESTS], among or plain, strict=False)
    asked = [each for pair in pairs for each in pair[: 1 + bool(among)]]
    start = time.monotonic()
    tokens = sum(await asyncio.gather(*map(one, asked)))
    return tokens / (time.monotonic() - start)


async def _watch(served: Served, http: httpx.AsyncClient, load: Load, started: float) -> None:
    while True:
        rss, usage, health = 0.0, 0.0, 200
        for server in served.servers:
            try:
                health = max(health, (await http.get(f"{server.url}/health")).status_code)
                shown = (await http.get(f"{server.url}/metrics")).text
                found = re.findall(r"^sglang:token_usage\{.* (\S+)$", shown, re.MULTILINE)
                usage = max([usage, *map(float, found)])
                rss += sum(process.memory_info().rss for process in server.family()) / 2**20
            except (httpx.TransportError, psutil.NoSuchProcess):
                health = 599
        load.samples.append(Sample(rss, usage, health, started, time.time()))
        await asyncio.sleep(SAMPLE_SECONDS)
