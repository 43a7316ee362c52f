"""Watches SGLang's graph runners: what they capture, what they replay, and what runs without a graph."""

from __future__ import annotations

from typing import Any

from tests.rehearsal import report


def install() -> None:
    """Wrap the runners' back ends and the model runner's forward, in this process."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph

    _watch_full(FullCudaGraphBackend)
    _watch_segments(breakable_cuda_graph.BreakableCUDAGraph)
    _watch_forwards(ModelRunner)


def _role(runner: Any) -> str:
    return "drafter" if runner.is_draft_worker else "target"


def _watch_full(backend: Any) -> None:
    capture, replay = backend.capture_one, backend.replay

    def capture_one(self: Any, shape_key: Any, forward: Any, *args: Any, **kwargs: Any) -> None:
        calls = iter((forward, lambda: None, forward))  # of two equal warm-ups one is left out: they take long here
        capture(self, shape_key, lambda: next(calls)(), *args, **kwargs)
        graph = self._graphs[shape_key]
        graph.poison()  # whatever a capture left there is no result
        runner = self._cuda_graph_runner
        name = f"{_role(runner.model_runner)} {shape_key.size}, width {runner.captured_req_width}"
        report.GRAPHS[name] = {"nodes": len(graph.nodes), "launches": graph.launches}

    def replay_one(self: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
        output = replay(self, shape_key, *args, **kwargs)
        role, width = _role(self._cuda_graph_runner.model_runner), self._cuda_graph_runner.captured_req_width
        report.REPLAYS[f"{role} {shape_key.size}"] += 1
        report.WIDTHS[f"{role} {width}"] += 1
        self._graphs[shape_key].poison(keep=output)
        return output

    backend.capture_one, backend.replay = capture_one, replay_one


def _watch_segments(graph: Any) -> None:
    replay = graph.replay

    def replay_segments(self: Any) -> None:
        report.REPLAYS["prefill"] += 1
        replay(self)

    graph.replay = replay_segments


def _watch_forwards(runner: Any) -> None:
    forward = runner.forward

    def forward_and_count(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, forward_batch, *args, **kwargs)
        if forward_batch.forward_mode.is_cuda_graph() and not output.can_run_graph:
            report.EAGER[f"{_role(self)} {forward_batch.batch_size}"] += 1
            report.EAGER_WIDTHS[f"{_role(self)} {len(forward_batch.input_ids) // forward_batch.batch_size}"] += 1
        return output

    runner.forward = forward_and_count
