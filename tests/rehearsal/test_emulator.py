"""The emulated graph is as strict as a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rehearsal.emulator import Graph, GraphError, captured_by


def capture(forward: Callable[[], Any]) -> tuple[Graph, Any]:
    graph = Graph()
    with torch.inference_mode(), captured_by(graph):
        output = forward()
    return graph, output


def test_a_replay_reads_its_inputs_anew_and_writes_where_the_capture_did() -> None:
    x = torch.arange(4.0)
    graph, output = capture(lambda: (x * 2).add_(1))
    address = output.data_ptr()
    x.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    graph.replay()
    assert output.data_ptr() == address
    assert output.tolist() == [11, 13, 15, 17]


def test_a_python_value_is_baked_in() -> None:
    scale = [2.0]
    x = torch.ones(2)
    graph, output = capture(lambda: x * scale[0])
    scale[0] = 3.0
    graph.replay()
    assert output.tolist() == [2, 2]


def test_views_and_writes_into_outside_memory_are_replayed() -> None:
    x, total = torch.ones(2, 3), torch.zeros(3)
    graph, _ = capture(lambda: total.add_(x[1].unsqueeze(0).sum(0)))
    total.zero_()
    for _ in range(3):
        graph.replay()
    assert total.tolist() == [3, 3, 3]


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "copy to the host": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "constant": lambda x: x + torch.tensor(1.0),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_a_capture_refuses(name: str) -> None:
    x = torch.arange(3.0)
    with pytest.raises(GraphError):
        capture(lambda: WAITS[name](x))
    assert Graph.capturing is None
    capture(lambda: x + 1)  # the next capture is not in its way


def test_freed_inputs_are_noticed() -> None:
    graph, _ = capture(lambda: torch.ones(2) + 0)  # its own: no error
    graph.replay()
    outside = [torch.ones(2)]
    graph, _ = capture(lambda: outside[0] + 1)
    outside.clear()
    with pytest.raises(GraphError, match="freed after the capture"):
        graph.replay()


def test_memory_that_no_output_holds_is_garbage() -> None:
    kept: list[Tensor] = []
    x = torch.ones(2)

    def forward() -> Tensor:
        kept.append(x + 1)
        return kept[0] * 2

    graph, output = capture(forward)
    graph.replay()
    graph.poison(keep=output)
    assert output.tolist() == [4, 4]
    assert kept[0].isnan().all()


def test_nothing_is_left_of_the_last_replay() -> None:
    """A sum that starts from what the graph's memory held before would grow from replay to replay."""
    graph, output = capture(lambda: torch.empty(2).add_(0))
    graph.replay()
    assert output.isnan().all()
