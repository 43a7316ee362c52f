"""CUDA graphs on CPU tensors: a capture records operators and Triton launches, a replay runs them again.

Like a CUDA graph:

* Python runs at capture only; numbers, shapes and addresses are constants.
* A result lives at the address that it had at capture; a replay writes there.
* Memory from outside is referenced, not owned: a replay that would read freed memory raises.
* A capture refuses operators that make the host wait or that read host data.
* The graph's memory holds garbage before every replay and, except for its outputs, after it: on a device the next graph
  of the pool overwrites it.

It does not emulate streams, events, collectives, and kernels that neither an operator nor Triton launches.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tests.plugin.dflash_test_plugin.host_waits import EachOperator, waits
from tests.rehearsal import interpreter
from tests.rehearsal.interpreter import pause
from tests.rehearsal.streams import tensors_in

_ALLOCATION = re.compile(r"aten::(new_)?empty(_\w+)?")
_GARBAGE = 0xFF  # NaN as a float of any size, -1 as an integer
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}  # other reads are operators that wait
_HOST_DATA = {torch.tensor, torch.as_tensor, torch.from_numpy}


class GraphError(RuntimeError):
    """A graph cannot be captured or replayed."""


class _External:
    """A tensor that the graph uses but does not own."""

    def __init__(self, tensor: torch.Tensor, node: str) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.node = tensor.dtype, node
        self.view = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> torch.Tensor:
        if self.storage.expired():
            raise GraphError(f"{self.node} reads memory that was freed after the capture: {self.dtype} {self.view}")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)


@dataclass(frozen=True)
class _Node:
    call: Any
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor | None]


class Graph:
    """Replacement of ``torch.cuda.CUDAGraph``.

    Attributes:
        capturing: the graph that is being captured in this process.
        nodes: what a replay runs, in order.
        own: storages that were made during the capture, by identity.
    """

    capturing: Graph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[_Node] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self._capture = contextlib.ExitStack()

    # --- capture

    def capture_begin(self, *args: Any, **options: Any) -> None:
        assert Graph.capturing is None and not self.nodes, "one capture at a time, and one for each graph"
        Graph.capturing = self
        interpreter.recorders.append(self._launch)
        self._capture.enter_context(_RefuseOnHost())
        self._capture.enter_context(_Record(self))

    def capture_end(self) -> None:
        Graph.capturing = None
        interpreter.recorders.remove(self._launch)
        self._capture.close()

    def instantiate(self) -> None:
        pass

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and make it a node; kernels that an operator of SGLang launches belong to it."""
        name = func._schema.name
        frozen = self._freeze(args, name), self._freeze(kwargs, name)
        known = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        interpreter.recorders.remove(self._launch)
        try:
            result = func(*args, **kwargs)
        finally:
            interpreter.recorders.append(self._launch)
        for tensor in tensors_in(result):
            if storage_id(tensor) not in known:
                self.own[storage_id(tensor)] = tensor.untyped_storage()
        if _ALLOCATION.fullmatch(name):  # kernels that would fill it run at replay; operators may index with it now
            for tensor in tensors_in(result):
                tensor.zero_()
        else:  # at replay the memory is there, with what the last replay left
            # A result in memory that is not the graph's would keep that memory alive.
            outputs = [tensor if storage_id(tensor) in self.own else None for tensor in tensors_in(result)]
            self.nodes.append(_Node(func, *frozen, outputs))
        return result

    def _launch(self, executor: Any, args: Any, kwargs: Any) -> None:
        name = executor.fn.__name__
        with pause():
            frozen = self._freeze(args, name), self._freeze(kwargs, name)
        self.nodes.append(_Node(executor, *frozen, []))

    def _freeze(self, tree: Any, node: str) -> Any:
        def one(tensor: torch.Tensor) -> Any:
            return tensor if storage_id(tensor) in self.own else _External(tensor, node)

        return tree_map_only(torch.Tensor, one, tree)

    # --- replay

    def replay(self) -> None:
        assert Graph.capturing is None
        self.poison()
        with torch.inference_mode(), pause():
            for node in self.nodes:
                args, kwargs = tree_map_only(_External, _External.tensor, (node.args, node.kwargs))
                result = node.call(*args, **kwargs)
                for captured, new in zip(node.outputs, tensors_in(result), strict=True):
                    if captured is not None and captured.data_ptr() != new.data_ptr():
                        captured.copy_(new)

    def poison(self, keep: Any = ()) -> None:
        """Overwrite the graph's memory but for the tensors in ``keep``."""
        kept = {storage_id(tensor) for tensor in tensors_in(vars(keep) if is_dataclass(keep) else keep)}
        for key, storage in self.own.items():
            if key not in kept and storage.nbytes():
                storage.fill_(_GARBAGE)

    def reset(self) -> None:
        self.nodes.clear()
        self.own.clear()


@contextlib.contextmanager
def captured_by(cuda_graph: Graph, pool: Any = None, stream: Any = None, **options: Any) -> Iterator[None]:
    """Replacement of ``torch.cuda.graph``."""
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


class _Record(EachOperator):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if waits(func, args, kwargs):
            raise GraphError(f"{name} makes the host wait while a graph is captured")
        if name.startswith("aten::lift"):
            raise GraphError(f"{name} brings host data into a graph")
        return self.graph.operator(func, args, kwargs)


class _RefuseOnHost(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise GraphError(f"{func.__name__} reads a tensor on the host while a graph is captured")
        if func in _HOST_DATA:
            raise GraphError(f"{func.__name__} brings host data into a graph")
        return func(*args, **(kwargs or {}))


def storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
