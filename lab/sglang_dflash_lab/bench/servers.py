"""The servers of a benchmark by arm: started when first needed, checked for being what their arm says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from sglang_dflash.diagnose.client import WORKER_KEY, Client
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.modes import AR, OURS, Mode
from sglang_dflash_lab.bench.results import file_name
from sglang_dflash_lab.bench.runner import PromptBook
from sglang_dflash_lab.bench.server import running
from sglang_dflash_lab.bench.settings import Settings

# What of ``/server_info`` is worth a line in the results: the rest repeats the command or changes all the time.
_KEPT = ("version", "launch_command", "dtype", "attention_backend", "tp_size", "dp_size", "page_size")


class Servers(AsyncExitStack):
    """Clients of the arms' servers; use as an async context manager, which stops what it started.

    Each server adds its line to the results file in ``settings.out``.

    Attributes:
        book: the prompts, the same for every arm.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        super().__init__()
        self._settings, self._say = settings, say
        self._modes = {mode.label: mode for mode in settings.modes}
        self._clients: dict[str, Client] = {}
        self.book = PromptBook(settings.out, settings.sampling.thinking)

    async def client(self, label: str) -> Client:
        """The client of an arm. With one server at a time, the other arm's server is stopped first."""
        if label not in self._clients:
            if not (self._settings.together or self._settings.base_urls):
                self._clients.clear()
                await self.aclose()
            self._clients[label] = await self._start(self._modes[label])
        return self._clients[label]

    async def _start(self, mode: Mode) -> Client:
        url = self._settings.base_urls.get(mode.label)
        command = url
        if url is None:
            launch = self._settings.launch(mode)
            command = launch.describe()
            self._say(f"starting {mode.label}: {command}")
            log = self._settings.out / "logs" / f"{file_name(mode.label)}.log"
            url = await self.enter_async_context(running(launch, log))
        client = await self.enter_async_context(Client(url))
        info = await client.server_info()
        check_arm(mode, info)
        row = {
            "mode": mode.label,
            "command": command,
            "info": {key: info.get(key) for key in _KEPT},
            "worker": info["internal_states"][0].get(WORKER_KEY),
        }
        results.append(self._settings.out, "server", [row])
        return client


def check_arm(mode: Mode, info: dict[str, Any]) -> None:
    """Refuse to measure something else than the arm says.

    SGLang only logs a plugin that it could not load: without this check a run of ``dflash`` could measure the builtin
    worker.

    Raises:
        DFlashError: speculation on or off against the mode, another block size, or another worker.
    """
    algorithm = info.get("speculative_algorithm")
    if (algorithm is None) != (mode.kind == AR):
        raise _other_server(mode, f"speculative_algorithm {algorithm}", "none" if mode.kind == AR else "speculation")
    if mode.kind not in (*OURS, "builtin"):
        return
    ours = WORKER_KEY in info["internal_states"][0]
    if ours != (mode.kind in OURS):
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
