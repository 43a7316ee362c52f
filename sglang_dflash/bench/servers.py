"""The servers of a session by arm: started when first needed, checked for being what their arm says."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Self

from sglang_dflash.bench.client import Client
from sglang_dflash.bench.modes import AR, Mode
from sglang_dflash.bench.results import Writer
from sglang_dflash.bench.runner import WORKER_KEY
from sglang_dflash.bench.server import running
from sglang_dflash.bench.settings import Settings
from sglang_dflash.errors import DFlashError

# What of `/server_info` is worth a line in the results: the rest repeats the command or changes all the time.
_KEPT = ("version", "launch_command", "dtype", "attention_backend", "tp_size", "dp_size", "page_size")


class Servers:
    """Clients of the arms' servers; use as an async context manager, which stops what it started."""

    def __init__(self, settings: Settings, writer: Writer, say: Callable[[str], None]) -> None:
        self._settings, self._writer, self._say = settings, writer, say
        self._modes = {mode.label: mode for mode in settings.modes}
        self._clients: dict[str, Client] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_all()

    async def client(self, label: str) -> Client:
        """The client of an arm. With one server at a time, the other arm's server is stopped first."""
        if label not in self._clients:
            if not (self._settings.together or self._settings.base_urls):
                await self._stop_all()
            self._clients[label] = await self._start(self._modes[label])
        return self._clients[label]

    async def _start(self, mode: Mode) -> Client:
        url = self._settings.base_urls.get(mode.label)
        launch = None
        if url is None:
            launch = self._settings.launch(mode)
            self._say(f"starting {mode.label}: {launch.describe()}")
            file_name = re.sub(r"[^\w.-]", "_", mode.label) + ".log"
            log = self._settings.out / "logs" / file_name
            url = await self._stack.enter_async_context(running(launch, log))
        client = await self._stack.enter_async_context(Client(url))
        info = await client.server_info()
        check_arm(mode, info)
        self._writer.server(
            {
                "mode": mode.label,
                "command": launch.describe() if launch else url,
                "info": {key: info.get(key) for key in _KEPT},
                "worker": info["internal_states"][0].get(WORKER_KEY),
            }
        )
        return client

    async def _stop_all(self) -> None:
        self._clients.clear()
        await self._stack.aclose()


def check_arm(mode: Mode, info: dict[str, Any]) -> None:
    """Refuse to measure something else than the arm says.

    SGLang only logs a plugin that it could not load: without this check a run of `dflash` could measure the builtin
    worker.

    Raises:
        DFlashError: speculation on or off against the mode, another block size, or another worker.
    """
    algorithm = info.get("speculative_algorithm")
    if (algorithm is None) != (mode.kind == AR):
        raise _other_server(mode, f"speculative_algorithm {algorithm}", "none" if mode.kind == AR else "speculation")
    if mode.kind not in ("dflash", "builtin"):
        return
    ours = WORKER_KEY in info["internal_states"][0]
    if ours != (mode.kind == "dflash"):
        raise _other_server(mode, f"{'our' if ours else 'not our'} worker", f"{mode.kind}'s worker")
    block = info.get("speculative_num_draft_tokens")
    if block != mode.size:
        raise _other_server(mode, f"block size {block}", f"block size {mode.size}")


def _other_server(mode: Mode, found: str, expected: str) -> DFlashError:
    return DFlashError(
        f"the server of arm {mode.label} has {found} in /server_info",
        expected=expected,
        remedy="see the beginning of its log for a plugin that was not loaded, or correct --modes",
    )
