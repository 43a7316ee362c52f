"""Measure host time of a decode step, ours over SGLang's: ``python -m sglang_dflash_lab.measure.host_step``.

Each arm's scheduler times slot reservation, the worker's step, publishing the lengths, and the worker's part when the
counts arrive. Forwards run in SGLang's CUDA-graph runners, whose host time counts: they check, pad and fill buffers.
A graph's replay returns the output of an eager forward of the same shape. Device work is subtracted: replays,
attention plans, injection, and torch stand-ins of kernels. Counted is the CPU time of the scheduler's thread.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import wraps
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from sglang_dflash.check import user_errors
from sglang_dflash.launch.settings import ONE_FORWARD_SWITCH
from sglang_dflash_lab.bench.arms import Arm, Pair, find_pair
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.measure.peers import recorded_graphs
from sglang_dflash_lab.tables import Table

FILE = "SGLANG_DFLASH_HOST_STEP_FILE"
WARM_UP, TOKENS = 10, 240  # steps left out per answer; tokens per answer
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLING = {
    "seeded top-p": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 1},
    "penalties": {**GREEDY, "frequency_penalty": 0.2, "presence_penalty": 0.1},
}
OURS, BUILTIN, PLAIN = "dflash:16", "builtin:16", "ar"
WINDOW = ("--speculative-draft-window-size", "512")
GRAPHS = "1 2 4 8 16 32"  # batch sizes
# Kind of step -> our arm, the arm that it is compared with and others, flags of all but plain decoding, sampling
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "greedy": ((f"{OURS}+{ONE_FORWARD_SWITCH}=1", BUILTIN, OURS, PLAIN), (), GREEDY),
    **{name: ((OURS, BUILTIN), (), sampling) for name, sampling in SAMPLING.items()},
    "adaptive": (("adaptive:16", BUILTIN), (), GREEDY),
    "draft window": ((OURS, BUILTIN), WINDOW, GREEDY),
    "width 1": (("adaptive:16", PLAIN), (), GREEDY),
}


_WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2."
# In addition to forwards, attention plans and the platform's functions
KERNELS = (
    "prepare_block view_rings take_drafts accept_block stage_block match_copies take_copies penalize_block "
    "seeded_tokens leading_tokens"
)
DEVICE = (
    *(f"sglang_dflash.ops.{name}" for name in KERNELS.split()),
    "sglang_dflash.states.replay.gdn_commit",
    "sglang_dflash.worker.forwards.Inject.write",
    "sglang_dflash.model.drafter.DFlashDraftModel.inject_staged",
    f"{_WORKER}_append_target_hidden_to_draft_kv_by_loc",
    f"{_WORKER}_greedy_sample_from_vocab_parallel_head",  # on a GPU, in the drafter's graph
)


class Stopwatch:
    """CPU time inside ``counted`` functions minus that inside ``excluded`` ones."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        self.running = False

    def _turn(self, on: bool) -> None:
        self.nanoseconds += (-1 if on else 1) * time.thread_time_ns()
        self.running = on

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(function)(lambda *args, **kwargs: self._run(True, function, args, kwargs))

    def excluded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(function)(lambda *args, **kwargs: self._run(False, function, args, kwargs))

    def exclude(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._run(False, function, args, kwargs)

    def _run(self, on: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.running == on:
            return function(*args, **kwargs)
        self._turn(on)
        try:
            return function(*args, **kwargs)
        finally:
            self._turn(not on)

    def read(self) -> int:
        spent, self.nanoseconds = self.nanoseconds, 0
        return spent


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers import scheduler as module
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash_cpu.replacements import TABLE
    from sglang_dflash_lab.measure.peers import builtin_on_cpu

    watch = Stopwatch()
    if os.environ.get("SGLANG_DFLASH") == "builtin":
        builtin_on_cpu.register()
        _take_gpu_path(watch)
    recorded_graphs.install(watch.exclude)
    for path in (*DEVICE, *(row.path for row in TABLE)):
        HookRegistry.register(path, watch.exclude, HookType.AROUND)
    init = module.Scheduler.__init__

    def timed_init(scheduler: Any, *parts: Any, **named: Any) -> None:
        init(scheduler, *parts, **named)
        _time_steps(scheduler.model_worker, watch)

    module.Scheduler.__init__ = timed_init
    schedule_batch.ScheduleBatch.prepare_for_decode = watch.counted(schedule_batch.ScheduleBatch.prepare_for_decode)
    FutureMap.publish = watch.counted(FutureMap.publish)
    module.run_scheduler_process(*args, **kwargs)


def _take_gpu_path(watch: Stopwatch) -> None:
    from sglang.srt.speculative import dflash_worker_v2 as module

    from sglang_dflash.ops.reference import step

    def prepare(*, block_ids_out: Any, positions_out: Any, cache_loc_out: Any, **call: Any) -> None:
        names = ("bonus_tokens", "prefix_lens", "req_pool_indices", "req_to_token")
        width, mask = block_ids_out.shape[1], call["mask_token_id"]
        block = step.prepare_block(*(call[name] for name in names), width=width, mask_token_id=mask)
        filled = block.tokens, block.positions, block.slots
        for out, found in zip((block_ids_out, positions_out, cache_loc_out), filled, strict=True):
            out.copy_(found.view_as(out))

    def accept(*, accept_lens_out: Any, **call: Any) -> None:
        accepted = step.accept_block(call["candidates"], call["target_top1"], call["prefix_lens"])
        outs = (call[f"{name}_out"] for name in ("out_tokens", "commit_lens", "bonus_ids", "new_seq_lens"))
        filled = accepted.out_tokens, accepted.accept_lens, accepted.bonus, accepted.new_seq_lens
        for out, found in zip(outs, filled, strict=True):
            out.copy_(found)

    init = module.DFlashWorkerV2.__init__

    def on_gpu(worker: Any, *args: Any, **kwargs: Any) -> None:
        init(worker, *args, **kwargs)
        worker._use_triton_prepare_block = worker._use_triton_accept_bonus = True

    module.DFlashWorkerV2.__init__ = on_gpu
    module._prepare_dflash_draft_block_unchecked = watch.excluded(prepare)
    module._compute_dflash_accept_bonus_triton_unchecked = watch.excluded(accept)


def _time_steps(worker: Any, watch: Stopwatch) -> None:
    step = worker.forward_batch_generation
    file = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115 (for the life of the process)

    def timed(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_decode():
            watch.read()
            return step(batch, *args, **kwargs)
        result = watch.counted(step)(batch, *args, **kwargs)
        print(batch.batch_size(), watch.read(), file=file)
        return result

    worker.forward_batch_generation = timed
    worker.on_verify_complete_cpu = watch.counted(worker.on_verify_complete_cpu)


class Timed:
    def __init__(self, pair: Pair, label: str, flags: tuple[str, ...], folder: Path) -> None:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import prepare_server_args

        class TimedEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

        arm = Arm.parse(label)
        self.label, self._file = label, folder / f"{label}.txt"
        self._file.touch()
        words = ["--model-path", pair.target, *arm.server_args(pair), *pair.server_args, "--skip-tokenizer-init"]
        words += ["--log-level", "error", "--cuda-graph-bs-decode", *GRAPHS.split()]
        words += flags if arm.kind != PLAIN else ()
        old = dict(os.environ)
        os.environ.update({FILE: str(self._file), **dict(arm.env)})
        recorded_graphs.allow_graphs()
        try:
            self._engine = TimedEngine(server_args=prepare_server_args(words))
        finally:
            os.environ.clear()
            os.environ.update(old)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # their exit signal

    def steps(self, batch: int, sampling: dict[str, Any]) -> list[float]:
        """Return the microseconds of each step with ``batch`` requests."""
        begin = self._file.stat().st_size
        prompts = [[10 + row + token for token in range(24)] for row in range(batch)]
        sampling = {**sampling, "max_new_tokens": TOKENS, "ignore_eos": True}
        self._engine.generate(input_ids=prompts, sampling_params=sampling)
        with self._file.open() as text:
            text.seek(begin)
            rows = [line.split() for line in text]
        return [int(spent) / 1000 for size, spent in rows if int(size) == batch][WARM_UP:]

    def close(self) -> None:
        self._engine.shutdown()


def measure(pair: Pair, kind: str, batches: list[int], repeats: int) -> Iterator[list[str]]:
    arms, flags, sampling = KINDS[kind]
    times = dict[tuple[str, int], list[float]]()
    with TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "width 1":
            (folder / "widths.json").write_text(json.dumps({"widths": [1]}))
            flags = (*flags, "--speculative-adaptive-config", str(folder / "widths.json"))
        for label in arms:
            with closing(Timed(pair, label, flags, folder)) as engine:
                for batch in batches:
                    times[label, batch] = [each for _ in range(repeats) for each in engine.steps(batch, sampling)]
    cuts = {key: quantiles(each, n=20) for key, each in times.items()}
    for batch, label in itertools.product(batches, arms):
        cut, over = cuts[label, batch], cuts[arms[1], batch]
        ratios = [f"{cut[part] / over[part]:.2f}" for part in (9, 1)]
        yield [kind, label, str(batch), f"{cut[9]:,.0f} [{cut[4]:,.0f}, {cut[14]:,.0f}]", *ratios]


def main(
    kinds: Annotated[str, typer.Option(help="Comma-separated kinds of step.")] = ",".join(KINDS),
    pair: Annotated[str, typer.Option(help="A tiny pair.")] = "tiny-hybrid",
    batch: Annotated[list[int], typer.Option(help="Concurrent requests.")] = [1, 8, 32],  # noqa: B006
    repeats: Annotated[int, typer.Option(help="Answers per arm and batch size.")] = 6,
) -> None:
    """Print microseconds of host time per decode step of each arm: median [quartiles], ratios."""
    typer.echo(describe_hardware(hardware()))
    rows = []
    with user_errors():
        for kind in kinds.split(","):
            for row in measure(find_pair(pair, None, None), kind, batch, repeats):
                rows.append(row)
                typer.echo(" | ".join(row), err=True)
    columns = ["step", "arm", "requests", "us", "over the second arm", "ratio of 10 % quantiles"]
    typer.echo(Table("", "", columns, rows).markdown())


if __name__ == "__main__":
    typer.run(main)
