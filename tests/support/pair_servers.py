"""Servers of the shipped pairs, plain and under DFLASH, and what our worker says of itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.servers import LAUNCH_SERVER, Server, running

# Track boundaries of the recurrent states every 64 tokens, so that short prompts cross some inside a block.
TRACKED = ("--mamba-track-interval", "64")
BASE = ("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "8", "--enable-metrics")
BFLOAT16 = ("--dtype", "bfloat16", "--skip-tokenizer-init", "--max-running-requests", "8")
# In place of ``BASE``: every request feature.
FEATURES = (
    *("--dtype", "float32", "--max-running-requests", "16"),
    *("--enable-custom-logit-processor", "--enable-return-hidden-states"),
    # Enough for the JSON that the pairs were trained on; without it an answer can end in spaces without end.
    *("--constrained-json-max-whitespace-cnt", "3"),
)
_ADAPTIVE = ("--speculative-adaptive", "--speculative-adaptive-config")
_WIDTHS = Path(__file__).parents[1] / "fixtures" / "widths"
# Another width at each step: whatever a policy may do.
RANDOM_WIDTHS = (*_ADAPTIVE, str(_WIDTHS / "random.json"))
# Always the full block, with copies: a block may be wider than the drafter's.
WIDE_WIDTHS = (*_ADAPTIVE, str(_WIDTHS / "fixed.json"))
# Blocks of up to twice the drafter's width, which comes before it on the command line.
WIDE = ("--speculative-num-draft-tokens", "32")
# Every fourth step a request loses its memory.
RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}


def target_arguments(pair: str, base: tuple[str, ...] = BASE) -> tuple[str, ...]:
    tracked = () if pair == "tiny-dense" else TRACKED
    return ("--model-path", str(target_path(pair)), *base, *tracked)


def draft_arguments(pair: str, drafter: str | Path = "good", block: int = 16) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(_folder(pair, drafter))),
        *("--speculative-num-draft-tokens", str(block)),
    )


def _folder(pair: str, drafter: str | Path) -> Path:
    return drafter if isinstance(drafter, Path) else drafter_path(pair, drafter)


def changed_drafter(pair: str, folder: Path, **changes: object) -> Path:
    """Copy the pair's drafter to ``folder/drafter``, with other keys in its config.json."""
    copy = Path(shutil.copytree(drafter_path(pair), folder / "drafter"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


@contextlib.contextmanager
def plain_server(
    pair: str, folder: Path, *arguments: str, base: tuple[str, ...] = BASE, **environment: str
) -> Iterator[Server]:
    """The pair's target without speculation."""
    with running(folder, *target_arguments(pair, base), *arguments, **environment) as server:
        yield server


@contextlib.contextmanager
def dflash_server(
    pair: str,
    folder: Path,
    *arguments: str,
    base: tuple[str, ...] = BASE,
    drafter: str | Path = "good",
    block: int = 16,
    launcher: tuple[str, ...] = LAUNCH_SERVER,
    **environment: str,
) -> Iterator[Server]:
    """The pair under DFLASH; asserts that it is our worker that serves."""
    command = (*target_arguments(pair, base), *draft_arguments(pair, drafter, block), *arguments)
    with running(folder, *command, launcher=launcher, **environment) as server:
        info = worker_info(server)
        assert (info["drafter"], info["block_size"]) == (str(_folder(pair, drafter)), block)
        yield server


@dataclass(frozen=True)
class RecordedServer:
    """A server, and the folder in which the plugin records its drafts, states and mixed batches."""

    server: Server
    folder: Path


def strict() -> dict[str, str]:
    """Environment of a server in which every host wait inside a step raises."""
    return {"SGLANG_DFLASH_FORBID_SYNC": "2", "PYTHONPATH": _path_with_plugin()}


def with_plugin(folder: Path, *modes: str) -> dict[str, str]:
    """Environment of a server that loads ``tests/plugin`` in these modes; ``folder`` is where they write and read."""
    variables = {"SGLANG_DFLASH_TEST_PLUGIN": ",".join(modes), "SGLANG_DFLASH_TEST_FOLDER": str(folder)}
    return {"PYTHONPATH": _path_with_plugin(), **variables}


def _path_with_plugin() -> str:
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[1] / "plugin"), os.environ.get("PYTHONPATH"))))


def worker_info(server: Server) -> dict[str, Any]:
    """What our worker says of itself in ``/server_info``."""
    info: dict[str, Any] = server.get("/server_info").json()["internal_states"][0]["sglang_dflash"]
    return info
