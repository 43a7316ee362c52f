"""Servers that several files of engine tests share, once per session, and the groups of tests that run together.

Starting a server takes longer than most tests. ``make test`` runs one short server per mechanism, ``make test-engine``
the other engine tests and what Triton compiles or interprets for minutes.

Tests that use the same session or module fixture run in the same worker of pytest-xdist (``--dist loadgroup``); other
engine tests run by themselves, and the others of a file run together. One worker begins with the largest group of
servers, the other with quick files; other servers start halfway (``--no-loadscope-reorder``).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from sglang_dflash_lab.bench.server import free_port
from tests.serving.matrix import Record
from tests.support.generation import assert_nothing_leaked
from tests.support.servers import (
    FEATURES,
    RANDOM_WIDTHS,
    WINDOWED,
    Server,
    dflash_server,
    ended,
    path_with,
    plain_server,
    with_plugin,
    with_refusals,
    worker_info,
)

settings.register_profile("tests", deadline=None)  # a machine under test is busy
settings.load_profile("tests")

# The reference shares the machine with the server under test: spinning OpenMP workers would starve it.
torch.set_num_threads(1)

# Of Triton, compiled or interpreted: not repeated once they have passed with the same files.
KERNELS = {"test_triton.py", "test_exact_kernels.py"}
# Their tests, and those of engines, that `make test` runs: beginnings of names.
SHORT = tuple(
    f"tests/{name}"
    for name in (
        # Plain decoding, DFLASH and its accept counts; updates of weights
        "serving/test_dflash_equality.py::test_equal_tokens_with_overlap",
        "serving/test_weight_updates.py::test_checks_of_weights_cover_the_drafter",
        "serving/test_weight_updates.py::test_a_resume_without_a_release_is_refused",
        # DFlash2 in mixed batches; recurrent states of a block
        "serving/test_dflash_equality.py::test_equal_tokens_of_a_dflash2_drafter_in_mixed_batches",
        "serving/test_dflash_reference.py::test_committed_recurrent_state_equals_a_fresh_prefill",
        # Blocks of any width with copies; features of requests; streams; gRPC
        "worker/test_copies_engine.py::test_repeats_are_copied_and_the_text_stays",
        *(
            f"serving/test_requests.py::test_the_answer_is_plain_decodings[random_widths_hybrid-{case}]"
            for case in ("nothing special", "json schema", "custom processor with state")
        ),
        "serving/test_streams.py::test_a_stream_is_plain_decodings[random_widths_hybrid-/v1/chat/completions]",
        "launch/test_entries.py::test_grpc",
        # A draft window in a ring; released memory
        "worker/test_draft_window.py::test_a_window_drafts_as_the_reference",
        "serving/test_sleep.py::test_after_a_resume_nothing_stale_is_read",
        # Kernels
        "ops/test_triton.py::test_a_vector_with_a_stride_is_refused",
        "ops/test_triton.py::test_a_destination_that_is_one_row_short_is_refused",
        "states/test_exact_kernels.py::test_a_misaligned_row_ends_the_step",
    )
)
OF_KERNELS = ("tests/ops", "tests/states", "tests/support", "tests/rehearsal", "tests/fixtures/cards")
PASSED = Record(Path(__file__).parents[1] / ".cache/kernels.jsonl", "sglang_dflash", *OF_KERNELS)


def lasting_fixtures(item: Any) -> set[str]:
    """What outlives the test: its session and module fixtures of our files, each parameter by itself."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    asked = {*getattr(item, "fixturenames", ()), *(param for param in params.values() if isinstance(param, str))}
    found = set[str]()
    for name in asked:
        *_, used = item.session._fixturemanager.getfixturedefs(name, item) or (None,)
        if used is not None and used.baseid and used.scope != "function":
            found.add(f"{used.baseid} {name} {item.callspec.indices[name] if name in params else ''}".strip())
    return found


def is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("engine") is not None or item.path.name in KERNELS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``make test`` leaves out, before pytest selects by markers."""
    for item in items:
        if is_long(item) and not item.nodeid.startswith(SHORT):
            item.add_marker("extended")


class Groups:
    """The selected tests in groups, whose order is that of the run."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        used = {item: lasting_fixtures(item) for item in items}
        groups: list[set[str]] = []
        for fixtures in filter(None, used.values()):
            shared = [group for group in groups if group & fixtures]
            groups = [*(group for group in groups if group not in shared), fixtures.union(*shared)]
        name_of = {fixture: min(group) for group in groups for fixture in group}
        group_of = dict[pytest.Item, str]()
        for item in items:
            alone = item.nodeid if is_long(item) else item.nodeid.partition("::")[0]
            group_of[item] = name_of[min(used[item])] if used[item] else alone
        sizes = Counter(group_of[item] for item in items if item.get_closest_marker("engine"))
        largest = max(sizes, key=sizes.__getitem__, default=None)
        quick = [item for item in items if not is_long(item)]
        first = {group_of[item] for item in quick[: len(quick) // 2]}
        # The largest, quick files, other long ones, quick files
        items.sort(key=lambda item: group_of[item] != largest and (1 if group_of[item] in first else 3 - is_long(item)))
        if getattr(config.option, "loadgroup", False):  # of a worker; the mark of pytest-xdist precedes the selection
            for item in items:
                item._nodeid = f"{item.nodeid}@{group_of[item]}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Groups())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.name in KERNELS and item.nodeid.partition("@")[0] in PASSED.results():
        pytest.skip("passed with the same files; to repeat it, remove .cache/kernels.jsonl")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and Path(report.location[0]).name in KERNELS:
        PASSED.add(report.nodeid.partition("@")[0], round(report.duration, 1))  # without pytest-xdist's group


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name the servers that ended to a test that fails; of one that it shares it sees a refused connection."""
    if call.excinfo is not None and call.excinfo.errisinstance(Exception):
        for server in ended():
            call.excinfo.value.add_note(server.describe_end())
    return (yield)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo what SGLang writes to the environment, which servers that start later would inherit.

    A test that replaces SGLang's functions in its process fails: those that compile SGLang's kernels would run others.
    """
    before = dict(os.environ)
    yield
    hooks = sys.modules.get("sglang.srt.plugins.hook_registry")
    assert hooks is None or not hooks.HookRegistry._patched
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def plain_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny-hybrid`` without speculation.

    Without overlap too: with it, SGLang's penalties learn of a token one step late, where ours never do.
    """
    folder = tmp_path_factory.mktemp("plain")
    plugin = with_plugin(folder, "penalty_order", "headers")
    flags = ("--disable-overlap-schedule", "--mamba-radix-cache-strategy", "extra_buffer")
    with plain_server("tiny-hybrid", folder, *flags, base=FEATURES, **plugin) as server:
        yield server


@pytest.fixture(scope="session")
def dflash_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny-hybrid`` under DFLASH with every request feature; ``test_faults.py`` plants faults in its folder.

    SGLang averages accept lengths over whole log intervals only; with intervals of one step it leaves none out.
    """
    folder = tmp_path_factory.mktemp("dflash")
    flags = "--enable-metrics", "--decode-log-interval", "1"
    plugin = with_plugin(folder, "faults", "headers", "memory")
    with dflash_server("tiny-hybrid", folder, *flags, base=FEATURES, **plugin) as server:
        yield server
        assert_nothing_leaked(server)


@pytest.fixture(scope="session")
def random_widths_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same with blocks of any width, up to twice the drafter's, and copies; over gRPC too.

    Its drafter is right often enough and not always. The histories are compared with the host's tokens at each step. It
    ends at a call that CUDA refuses.
    """
    folder = tmp_path_factory.mktemp("widths")
    flags = *RANDOM_WIDTHS, "--grpc-port", str(free_port())
    plugin = with_refusals(with_plugin(folder, "history", "drafts", "headers"))
    with dflash_server("tiny-hybrid", folder, *flags, base=FEATURES, drafter="noisy", block=32, **plugin) as server:
        yield server
        assert int((folder / "histories.txt").read_text()) > 0
        info = worker_info(server)
        assert set(info["steps_by_width"]) == {"1", "2", "4", "8", "12", "16", "32"}, info
        assert_nothing_leaked(server)


@pytest.fixture(scope="session")
def recorded_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny-hybrid`` under DFlash2, recorded; a low request limit forces prefills between decode steps."""
    folder = tmp_path_factory.mktemp("recorded")
    schedule = ("--max-running-requests", "4", "--chunked-prefill-size", "256", "--enable-mixed-chunk")
    plugin = with_plugin(folder, "drafts", "states")
    with dflash_server("tiny-hybrid", folder, *schedule, base=FEATURES, drafter="dflash2", **plugin) as server:
        yield server
        assert_nothing_leaked(server)


@pytest.fixture(scope="session")
def windowed_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``tiny-hybrid`` with a draft window, pages and chunks, recorded; its memory can be released.

    It ends at a call that CUDA refuses.
    """
    folder = tmp_path_factory.mktemp("windowed")
    plugin = {**with_plugin(folder, "drafts", "memory"), "PYTHONPATH": path_with("plugin", "memory_saver")}
    with dflash_server("tiny-hybrid", folder, *WINDOWED, drafter="interleaved", **with_refusals(plugin)) as server:
        yield server
        assert_nothing_leaked(server)


@pytest.fixture(scope="session")
def copies_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same without a drafter."""
    folder = tmp_path_factory.mktemp("copies")
    plugin = with_plugin(folder, "history", "headers", "memory")
    with dflash_server("tiny-hybrid", folder, *RANDOM_WIDTHS, base=FEATURES, drafter=None, **plugin) as server:
        yield server
        assert int((folder / "histories.txt").read_text()) > 0
        info = worker_info(server)
        assert set(info["steps_by_width"]) == {"1", "2", "4", "8", "16"}, info
        assert info["memory_bytes"]["drafter_weights"] == info["memory_bytes"]["draft_kv"] == 0
        assert_nothing_leaked(server)


SLOW_SERVERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("dflash_hybrid", "copies_alone")]


@pytest.fixture(params=["random_widths_hybrid", *SLOW_SERVERS])
def server(request: pytest.FixtureRequest) -> Server:
    """Blocks of any width with copies; in the slow set full blocks, and copies alone, too."""
    served: Server = request.getfixturevalue(request.param)
    return served
