"""What happens to servers under load. An event is a coroutine; its name is in the report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import httpx

from sglang_dflash_lab.pairs import drafter_path
from tests.serving.test_weight_updates import serialized, tensors_of
from tests.soak.catalogue import HOSTILE, Entry
from tests.soak.load import Load, speed

if TYPE_CHECKING:
    from tests.soak.rows import Served

Event = Callable[["Served", httpx.AsyncClient, "asyncio.Task[None]", Sequence[Entry], Load], Awaitable[None]]
MOMENT = 1.0  # seconds, so that requests run


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, (path, answer.text)
    assert '"success":false' not in answer.text.replace(" ", ""), (path, answer.text)


async def same_weights(served: Served, http: httpx.AsyncClient, *_: Any) -> None:
    """K/V and prefixes stay, because the weights do; another tokenizer's requests run."""
    await post(http, "/update_weights_from_disk", model_path=str(served.versions[0]), flush_cache=False)


async def flushed(served: Served, http: httpx.AsyncClient, done: asyncio.Task[None], *_: Any) -> None:
    await done
    await served.flush(http)


async def first_dies(served: Served, *_: Any) -> None:
    """Its scheduler is killed; it is started again once its other processes had time to notice."""
    await asyncio.sleep(MOMENT)
    await asyncio.to_thread(served.servers[0].die_and_return)


async def second_dies(served: Served, *_: Any) -> None:
    await asyncio.sleep(MOMENT)
    await asyncio.to_thread(served.servers[1].die_and_return)


async def all_aborted(served: Served, http: httpx.AsyncClient, *_: Any) -> None:
    await asyncio.sleep(MOMENT)
    await post(http, "/abort_request", rid="", abort_all=True)


async def updated(served: Served, http: httpx.AsyncClient, *_: Any) -> None:
    """The next version of the target; SGLang waits until no request runs."""
    await served.become(http, (served.version + 1) % len(served.versions))


async def paused_and_updated(served: Served, http: httpx.AsyncClient, *_: Any) -> None:
    """Requests that run are read again with the new weights, and go on with them."""
    await asyncio.sleep(MOMENT)
    await post(http, "/pause_generation", mode="retract")
    await updated(served, http)
    await post(http, "/continue_generation")


async def paused(served: Served, http: httpx.AsyncClient, *_: Any) -> None:
    await asyncio.sleep(MOMENT)
    await post(http, "/pause_generation", mode="in_place")
    await asyncio.sleep(MOMENT)
    await post(http, "/continue_generation")


async def slept(served: Served, http: httpx.AsyncClient, *_: Any) -> None:
    """Requests that run are aborted; those that come wait."""
    await asyncio.sleep(MOMENT)
    await post(http, "/pause_generation", mode="abort")
    for call in ("release", "resume"):
        for tag in ("kv_cache", "weights"):
            await post(http, f"/{call}_memory_occupation", tags=[tag])
    await served.become(http, served.version)
    await post(http, "/continue_generation")


async def other_drafter(served: Served, http: httpx.AsyncClient, *_: Any) -> None:
    for kind in ("good", "noisy"):
        tensors = serialized(tensors_of(drafter_path("tiny-hybrid", kind)))
        await post(http, "/begin_weight_update", selector="draft")
        await post(http, "/update_weights_from_tensor", serialized_named_tensors=tensors, selector="draft")
        await post(http, "/end_weight_update")


async def measured(
    served: Served, http: httpx.AsyncClient, done: asyncio.Task[None], entries: Sequence[Entry], load: Load
) -> None:
    """Good requests alone, and among as many hostile ones."""
    await done
    for others, speeds in (([], load.speeds), ([each for each in entries if each.kind == HOSTILE], load.among)):
        await served.flush(http)
        speeds.append(await speed(http, entries, others))


DISTURBING = {each.__name__ for each in (first_dies, second_dies, all_aborted, slept)}  # requests may fail then
