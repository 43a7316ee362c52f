"""The kit without servers: which jobs run together, what a cut-off call leaves, and the page of published rows."""

from __future__ import annotations

import importlib
import pkgutil
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_dflash
from tools import wheelhouse
from tools.gpu import plugin, rows, site
from tools.gpu.call import Call, Job
from tools.gpu.trace import per_step


def test_the_published_page_is_that_of_its_rows() -> None:
    folder = site.ROOT / "docs/internals/gpu"
    found = rows.read(folder)
    assert rows.page(found) == folder.with_suffix(".md").read_text()
    lines = rows.step_lines([row for row in found if row["what"] == "steps"])
    ratios = {round(line["replayed / builtin"], 2) for line in lines if "replayed" in line}
    assert ratios == {0.99, 0.85, 0.80}  # README


def test_timed_jobs_run_alone_and_slices_fit(tmp_path: Path) -> None:
    running, seen, lock = set[str](), list[tuple[str, set[str]]](), threading.Lock()

    def note(job: Job, part: str, seconds: float) -> None:
        with lock:
            running.add(f"{job.name} {part}")
        time.sleep(seconds)
        with lock:
            seen.append((f"{job.name} {part}", {*running}))
            running.discard(f"{job.name} {part}")

    def text(job: Job) -> dict[str, Any]:
        note(job, "text", 0.1)
        return {"texts": 1}

    def timed(job: Job) -> None:
        note(job, "start", 0.05)
        job.wait_for_turn()
        note(job, "timed", 0.05)

    def fail(job: Job) -> None:
        raise ValueError("broken")

    jobs = [Job("a", 2, text, "texts"), Job("b", 2, timed, "steps"), Job("c", 3, timed, "steps")]
    jobs += [Job("d", 2, text, "texts"), Job("e", 1, fail, "cases"), Job("f", 9, timed, "micro", alone=True)]
    Call(site.CPU, tmp_path, 5, 60).run(jobs)
    sizes = {job.name: job.gib for job in jobs}
    assert {name for name, _ in seen} >= {"a text", "b timed", "c timed", "d text", "f start", "f timed"}
    for name, others in seen:
        assert len(others) == 1 or "timed" not in name + "".join(others), (name, others)
        assert name.startswith("f") or sum(sizes[other[0]] for other in others) <= 5
    found = rows.read(tmp_path)
    assert [row["job"] for row in found if row["what"] == "texts"] == ["a", "d"]
    [failed] = [row for row in found if "error" in row]
    assert failed["what"] == "cases" and failed["error"].endswith("ValueError: broken")
    assert found[-1]["errors"] == 1 and found[-1]["cut_off"] == []


def test_what_the_clock_ends_leaves_the_end_of_its_log(tmp_path: Path) -> None:
    def endless(job: Job) -> None:
        (job.folder / "server-1.log").write_text("loading weights\n")
        threading.Event().wait()

    began = time.monotonic()
    Call(site.CPU, tmp_path, 1, 0.5).run([Job("slow", 1, endless, "texts"), Job("next", 1, endless, "steps")])
    assert time.monotonic() - began < 30
    slow, waiting, end = rows.read(tmp_path)
    assert slow["error"] == "loading weights\n\nended by the clock while busy"
    assert waiting["error"].endswith("ended by the clock while waiting") and end["cut_off"] == ["slow", "next"]
    assert "ended by the clock while busy" in rows.page([slow, waiting, end])


@pytest.mark.sglang
@pytest.mark.parametrize("stage", plugin.STAGES)
def test_a_stage_is_a_function(stage: str) -> None:
    assert callable(pkgutil.resolve_name(plugin.STAGES[stage]))
    assert f"{stage}_ms" in rows.PAGE["tables"]["stages"]["columns"]


@pytest.mark.sglang
def test_the_kit_replaces_no_function_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures the worker that users get: its hooks there take times and return what they got."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for _, name, _ in pkgutil.walk_packages(sglang_dflash.__path__, "sglang_dflash."):
        importlib.import_module(name)

    def functions() -> dict[tuple[str, str], Any]:
        ours = {name: module for name, module in sys.modules.items() if name.startswith("sglang_dflash.")}
        return {(name, each): value for name, module in ours.items() for each, value in vars(module).items()}

    hooks, before = list[tuple[str, Any, Any]](), functions()
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: hooks.append((target, hook, kind)))
    for place in ((torch.cuda, "mem_get_info"), (torch.cuda.memory, "mem_get_info"), (torch.cuda.Event, "synchronize")):
        monkeypatch.setattr(*place, getattr(*place))
    variables = {"GPU_KIT_GIB": "1", "GPU_KIT_MODULES": "here", "GPU_KIT_HOST": "1", "SGLANG_SIMULATE_ACC_LEN": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plugin.register()
    after = functions()
    assert [key for key, value in before.items() if after[key] is not value] == []
    ours = [(hook, kind) for target, hook, kind in hooks if target.startswith("sglang_dflash.")]
    assert ours and all(kind is HookType.AROUND for _, kind in ours)
    assert all(hook(lambda: variables) is variables for hook, _ in ours)


def test_fa3s_library_goes_in_pieces_and_comes_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheelhouse, "FA3", tmp_path / "fa3")
    monkeypatch.setattr(site, "FA3", tmp_path / "fa3")
    library, file = bytes(random.Random(0).randbytes(5000)), tmp_path / "flash_ops.abi3.so"
    wheelhouse.divide(library, 2000)
    pieces = sorted(path.name for path in (tmp_path / "fa3").iterdir())
    assert pieces == ["01-of-03", "02-of-03", "03-of-03"]
    (tmp_path / "fa3/02-of-03").rename(tmp_path / "missing")
    site.join(file)
    assert not file.exists()
    (tmp_path / "missing").rename(tmp_path / "fa3/02-of-03")
    site.join(file)
    assert file.read_bytes() == library


def test_the_wheelhouse_hides_no_package_of_the_machine() -> None:
    """A package that is packed in part and found first would hide the machine's whole one."""
    packed, there = (wheelhouse.read_list(path.read_text()) for path in (wheelhouse.LIST, wheelhouse.IMAGE))
    names, its = ({each.partition("==")[0].lower() for each in some} for some in (packed, there))
    assert names & its == {"transformers"}  # SGLang requires another release


def test_a_profile_counts_per_step() -> None:
    def event(category: str, name: str, start: float, correlation: int, seconds: float = 2.0) -> dict[str, Any]:
        return {"cat": category, "name": name, "ts": start, "dur": seconds, "args": {"correlation": correlation}}

    events = [event("cuda_runtime", "cudaGraphLaunch", 0, 1), event("cuda_runtime", "cudaLaunchKernel", 0, 2)]
    events += [event("kernel", "verify", 10, 1, 4), event("kernel", "verify", 14, 1, 4), event("kernel", "pick", 20, 2)]
    found = per_step(events, 2)
    assert (found["kernels"], found["launches"], found["graph_launches"]) == (1.5, 0.5, 0.5)
    assert found["kernels_outside_graphs"] == 0.5 and round(found["idle"], 3) == round(1 - 10 / 12, 3)
    assert found["longest_ms"] == {"verify": 0.004, "pick": 0.001}
