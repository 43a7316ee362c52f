"""The rows of ``make soak``: servers, load and events, as data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from sglang_dflash_lab.pairs import NAMES, target_path
from tests.families.pairs import TARGETS, build
from tests.serving.matrix import EXACT
from tests.serving.test_dp_attention import ranks
from tests.serving.test_images import drafter_for_images, write_target
from tests.soak import events
from tests.soak.catalogue import EVERYTHING, HOSTILE, PLAIN
from tests.soak.events import Event
from tests.soak.load import ABORTED, AT_ONCE, FATES
from tests.support.checkpoints import copy_of
from tests.support.servers import (
    BASE,
    FEATURES,
    RANDOM_WIDTHS,
    RETRACTED,
    TRACKED,
    Server,
    disaggregated,
    draft_arguments,
    path_with,
    router,
    running,
    target_arguments,
    with_plugin,
)


@dataclass
class Served:
    """What a load talks to, the servers behind it, and the target's weights: folders, and the one that is served."""

    url: str
    servers: list[Server]
    versions: list[Path]
    version: int = 0

    async def flush(self, http: httpx.AsyncClient) -> None:
        """Empty the prefix caches once the servers are idle."""
        for server in self.servers:
            (await http.post(f"{server.url}/flush_cache", params={"timeout": 60})).raise_for_status()

    async def become(self, http: httpx.AsyncClient, version: int) -> None:
        await events.post(http, "/update_weights_from_disk", model_path=str(self.versions[version]))
        self.version = version


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        kinds: of the catalogue.
        pair: a shipped one, a family of ``tests/families/pairs.py``, or a target of ``tests/serving/test_images.py``.
        servers: several, for a folder; default: one.
        events: they happen in turn, each during a burst.
        more: keys of a request, drawn for each.
        versions: of the target's weights.
        long: whether memory and speed are judged.
        short: what must have happened: words of the servers' logs, or ``TAILS``.
    """

    name: str
    requests: int
    kinds: Sequence[str]
    flags: tuple[str, ...] = ()
    base: tuple[str, ...] = FEATURES
    pair: str = "tiny-hybrid"
    drafter: str = "noisy"
    block: int = 16
    servers: Callable[[Row, Path], AbstractContextManager[Served]] | None = None
    events: Sequence[Event] = ()
    fates: Mapping[str, float] = field(default_factory=lambda: FATES)
    at_once: Sequence[int] = AT_ONCE
    more: Callable[[Random], dict[str, Any]] = lambda random: {}
    environment: Mapping[str, str] = field(default_factory=dict)
    plugin: tuple[str, ...] = ()
    versions: int = 1
    long: bool = False
    short: Sequence[str] = ()

    def arguments(self, out: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return those of the target and of the drafter, which are built if they are not shipped."""
        if self.pair in NAMES:
            return target_arguments(self.pair, self.base), draft_arguments(self.pair, self.drafter, self.block)
        built = out / "model"
        if not (built / "drafter").exists():
            if self.pair in TARGETS:
                build(self.pair, built)
            else:
                write_target(self.pair, built / "target")
                drafter_for_images(built / "drafter")
        target = ("--model-path", str(built / "target"), *self.base)
        return target, draft_arguments("", built / "drafter", self.block)

    def weights(self, out: Path) -> list[Path]:
        """Return the target's folder, and those of copies with other weights."""
        first = target_path(self.pair) if self.pair in NAMES else out / "model" / "target"
        others = [out / f"version-{number}" for number in range(1, self.versions)]
        for seed, folder in enumerate(others):
            if not folder.exists():
                generator = torch.Generator().manual_seed(seed)
                tensors = load_file(first / "model.safetensors")
                for tensor in (each for each in tensors.values() if each.ndim == 2):
                    tensor += 0.1 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)
                copy_of(first, folder, tensors)
        return [first, *others]

    def variables(self, out: Path) -> dict[str, str]:
        # With two tokenizers, requests would hang if a scheduler raised.
        plugin = {**with_plugin(out, "pools", *self.plugin), "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION": "1"}
        saver = {"PYTHONPATH": path_with("plugin", "memory_saver")} if "--enable-memory-saver" in self.flags else {}
        return {**plugin, **self.environment, **saver}


@contextlib.contextmanager
def alone(row: Row, out: Path) -> Iterator[Served]:
    target, draft = row.arguments(out)
    with running(out, *target, *draft, *row.flags, **row.variables(out)) as server:
        yield Served(server.url, [server], row.weights(out))


@contextlib.contextmanager
def split(row: Row, out: Path) -> Iterator[Served]:
    """The decoding server first."""
    with disaggregated(row.pair, out, *row.flags, drafter=row.drafter, **row.variables(out)) as all_of_them:
        yield Served(all_of_them.router.url, [all_of_them.decode, all_of_them.prefill], row.weights(out))


@contextlib.contextmanager
def replicas(row: Row, out: Path) -> Iterator[Served]:
    """One server with two replicas, one with one, and SGLang's router."""
    target, draft = row.arguments(out)
    with contextlib.ExitStack() as stack:
        command, variables = (*target, *draft, *row.flags), row.variables(out)
        both = [stack.enter_context(running(out, *command, "--dp-size", n, **variables)) for n in ("2", "1")]
        front = stack.enter_context(router(out, "--worker-urls", *(server.url for server in both)))
        yield Served(front.url, both, row.weights(out))


EAGER = ("--schedule-conservativeness", "0.05")
# K/V for one of the longest requests and a few short ones; eight may run, and more are begun than can end.
SCARCE = (
    *("--max-total-tokens", "2304", "--max-running-requests", "8", "--chunked-prefill-size", "512"),
    *EAGER,
)
ADAPTIVE = ("--speculative-adaptive", "--mamba-radix-cache-strategy", "extra_buffer", "--enable-metrics")
WINDOW = ("--speculative-draft-window-size", "512")
PRIORITIES = (
    *("--enable-priority-scheduling", "--default-priority-value", "0"),
    *("--priority-scheduling-preemption-threshold", "3"),
)
# A dead peer is given up soon, and so are its slots.
IMPATIENT = {f"SGLANG_DISAGGREGATION_{each}_TIMEOUT": "60" for each in ("BOOTSTRAP", "WAITING")}
IMPATIENT |= {"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2"}
# By default SGLang holds them for 30 seconds, and /health waits for a free one for 20.
IMPATIENT |= {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5"}
ROUTED = {fate: share for fate, share in FATES.items() if fate != ABORTED}  # the router aborts nothing
FAMILY = (*BASE, "--chunked-prefill-size", "128")
RETRACTION, TAILS = "retracted_reqs: [1-9]", "evicted tails"

MAIN = Row(
    *("main", 10000, EVERYTHING, (*SCARCE, *ADAPTIVE, *WINDOW, *PRIORITIES, "--tokenizer-worker-num", "2")),
    block=32,
    events=(events.same_weights, events.flushed),
    more=lambda random: {"priority": random.choice((0, 0, 0, 1, 5))},
    plugin=("history", "tails"),
    long=True,
    short=(RETRACTION, TAILS),
)
# Greedy alone: SGLang's sampler may choose the other of two equal logits next to a sampled request
# (docs/internals/exact.md#seeds).
EXACTLY = Row(
    *("exact", 1000, PLAIN, ("--disable-radix-cache", *ADAPTIVE), EXACT),
    block=32,
)
PAIRS = [
    Row(
        *(name, 1000, PLAIN, flags, BASE, pair),
        servers=split,
        events=(events.first_dies, events.second_dies),
        fates=ROUTED,
        at_once=(1, 4, 8, 16),
        environment=IMPATIENT,
    )
    for name, pair, flags in (("pair", "tiny-hybrid", WINDOW), ("pair, dense", "tiny-dense", ()))
]
REPLICAS = Row(
    *("replicas", 1000, PLAIN, ADAPTIVE),
    servers=replicas,
    events=(events.first_dies,),
    fates=ROUTED,
)
RANKS = Row(
    *("ranks", 1000, PLAIN, (*ranks(4, 4), "--speculative-adaptive"), FEATURES + ("--enable-metrics",), "tiny-moe"),
    events=(events.all_aborted, events.flushed),
    more=lambda random: {"routed_dp_rank": random.choice((0, 0, 0, 0, 1, 2))},
)
TRAINER = Row(
    *("trainer", 1000, PLAIN, (*ADAPTIVE, *WINDOW, "--enable-memory-saver")),
    events=(
        *(events.paused_and_updated, events.slept, events.updated, events.paused, events.other_drafter),
        *(events.paused_and_updated, events.flushed),
    ),
    versions=2,
)
FAMILIES = [
    Row(
        *(f"families, {pair}", 500, ("random", "shared"), flags, FAMILY, pair),
        environment=RETRACTED if pair != "gpt_oss" else {},
        plugin=("oracle",),
        events=(events.flushed,),
        short=(RETRACTION,),
    )
    for pair, flags in (
        ("gpt_oss", ("--max-total-tokens", "8192", "--swa-full-tokens-ratio", "0.05", *EAGER)),
        ("deepseek_v3", RANDOM_WIDTHS),
    )
]
IMAGES = Row(
    *("images", 300, ("image",), (*TRACKED, "--chunked-prefill-size", "64"), ("--dtype", "float32")),
    pair="qwen3_5",
    block=8,
    events=(events.flushed,),
)
HOSTILES = Row(
    *("hostile", 1000, (*PLAIN, HOSTILE, HOSTILE), ADAPTIVE),
    events=(events.measured,),
)
ROWS = [MAIN, EXACTLY, *PAIRS, REPLICAS, RANKS, TRAINER, *FAMILIES, IMAGES, HOSTILES]
