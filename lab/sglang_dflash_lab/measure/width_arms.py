"""The servers of a width comparison, all up at once, and which arm is which server at which width.

Fixed widths and the adaptive policy are one server, whose policy the test plugin switches between requests. The others
are plain decoding and SGLang's own worker, one server per block of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from sglang_dflash.diagnose.client import Client
from sglang_dflash_lab.bench.modes import AR, Mode
from sglang_dflash_lab.bench.options import Options
from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.bench.servers import check_arm
from sglang_dflash_lab.bench.settings import configure

ROOT = Path(__file__).parents[3]
PLAIN, ADAPTIVE, BUILTIN = "plain", "adaptive", "builtin"
FIXED = ("2", "4", "8", "16")
ARMS = (PLAIN, *FIXED, f"{BUILTIN}:16", ADAPTIVE)
WIDEST = 16
_OWN = "own"  # what the plugin's file says for the server's own policy


class Arms(AsyncExitStack):
    """Use as an async context manager, which stops the servers.

    Args:
        most: requests that each server has room for.
        folder: of the servers' logs.
    """

    def __init__(self, pair: str, drafter: str, arms: Iterable[str], most: int, folder: Path) -> None:
        super().__init__()
        self._pair, self._drafter, self._most, self._folder = pair, drafter, most, folder
        self._modes = {arm: server_of(arm) for arm in arms}
        self._file = folder / "width"
        self._clients: dict[Mode, Client] = {}

    async def start(self, say: Callable[[str], None]) -> None:
        """Start every server that an arm needs, one after the other.

        Raises:
            DFlashError: one is not what its arms say.
        """
        self._file.unlink(missing_ok=True)
        for mode in dict.fromkeys(self._modes.values()):
            launch = self._launch(mode)
            say(launch.describe())
            log = self._folder / f"{mode.kind}-{mode.size}.log"
            client = await self.enter_async_context(Client(await self.enter_async_context(running(launch, log))))
            check_arm(mode, await client.server_info())
            self._clients[mode] = client

    def choose(self, arm: str) -> Client:
        """The arm's server, at the arm's width from the next request on. Nothing may be in flight."""
        mode = self._modes[arm]
        if mode.kind == ADAPTIVE:
            self._file.write_text(_OWN if arm == ADAPTIVE else arm)
        return self._clients[mode]

    def _launch(self, mode: Mode) -> Launch:
        settings = configure(
            Options(
                pair=self._pair,
                drafter=self._drafter,
                modes=mode.label,
                concurrency=str(self._most),
                builtin_shims=Path(__file__).with_name("peers"),
            )
        )
        launch = settings.launch(mode)
        if mode.kind != ADAPTIVE:
            return launch
        plugin = {
            "PYTHONPATH": str(ROOT / "tests/plugin"),
            "SGLANG_DFLASH_TEST_PLUGIN": "width_switch",
            "SGLANG_DFLASH_TEST_WIDTH_FILE": str(self._file.resolve()),
        }
        return replace(launch, env=(*launch.env, *plugin.items()))


def server_of(arm: str) -> Mode:
    """How the server is started that serves the arm."""
    if arm == PLAIN:
        return Mode.parse(AR)
    return Mode.parse(arm if arm.startswith(BUILTIN) else f"{ADAPTIVE}:{WIDEST}")
