"""Streams, events and the caching allocator, emulated: in place of those of ``torch.cuda``, on a CPU.

Operators run at once, in the order of the host's program. A stream's vector clock says how much of every other stream
(and of the host) its next operator comes after; :class:`Watch` compares the clocks of accesses.

What streams do to memory, watched: two accesses that no event puts in order are a race.

Two accesses to one memory, one of them a write, that the streams' clocks leave unordered can swap places on a GPU. So
one run stands for every legal order of its operators, and no order has to be drawn by chance. Reported are

* a read or a write that no event puts behind a write, or a write behind a read, of another stream or of the host (a
  result read before its event, a buffer reused under a pending copy);
* memory that its stream may hand out again while another stream still uses it (no ``record_stream``).

Device and host are one here. A tensor is the host's if it was made without a device or for ``"cpu"`` by that word, or
from the host's tensors alone; a copy between the two is made where a GPU would make one. What that hides: operators
that are not PyTorch's (there are none on the CPU platform), the host's memory where nothing is copied to or from it,
and parts of one tensor, because a tensor is one memory: a race of two rows is reported too.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.plugin.dflash_test_plugin.host_waits import EachOperator, waits
from tests.rehearsal.refusals import Refused, is_refused, refusal

Clock = dict[int, int]
_ids = itertools.count()
_streams = weakref.WeakSet[Any]()


def join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class _Awaited:
    """What the host can wait for: everything in ``seen``."""

    seen: Clock

    def synchronize(self) -> None:
        join(HOST.seen, self.seen)

    def query(self) -> bool:
        self.synchronize()  # the host may act on it
        return True


class Stream(_Awaited):
    """In place of ``torch.cuda.Stream``; ``seen`` is what its next operator comes after."""

    def __init__(self, *args: Any, name: str = "stream", **options: Any) -> None:
        self.id, self.name = next(_ids), name
        self.seen: Clock = {}
        _streams.add(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "synchronize":  # SGLang makes it a no-op where the device is a CPU
            super().__setattr__(name, value)

    def launch(self) -> None:
        """The host enters an operator."""
        join(self.seen, HOST.seen)
        self.seen[self.id] = self.seen.get(self.id, 0) + 1

    def wait_stream(self, other: Stream) -> None:
        join(self.seen, other.seen)

    def wait_event(self, event: Event) -> None:
        join(self.seen, event.seen)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event(_Awaited):
    """In place of ``torch.cuda.Event``. One that was not recorded makes nobody wait, as on CUDA."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        join(stream.seen, HOST.seen)
        self.seen = dict(stream.seen)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


HOST, DEFAULT = Stream(name="host"), Stream(name="default")
_current = DEFAULT


def current_stream(device: Any = None) -> Stream:
    return _current


class StreamContext:
    """In place of ``torch.cuda.StreamContext``; may be entered again."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._outer = stream, [DEFAULT][:0]

    def __enter__(self) -> None:
        global _current
        self._outer.append(_current)
        _current = self._stream or _current

    def __exit__(self, *error: Any) -> None:
        global _current
        _current = self._outer.pop()


def synchronize(device: Any = None) -> None:
    """In place of ``torch.cuda.synchronize``."""
    for stream in [*_streams]:
        join(HOST.seen, stream.seen)


def install() -> None:
    """``torch.cpu`` has streams and events from now on."""
    for name, value in (("Stream", Stream), ("Event", Event), ("StreamContext", StreamContext)):
        setattr(torch.cpu, name, value)
    torch.cpu.stream, torch.cpu.current_stream, torch.cpu.synchronize = StreamContext, current_stream, synchronize
    torch.compiler.set_stance("force_eager")  # under the mode that watches calls, the compiler mixes up local variables


_from_numpy = torch.from_numpy
_METADATA_ONLY = re.compile(r"aten::(new_.*|.*_like)$")
# Calls that touch no memory.
_ABOUT_A_TENSOR = {
    *("untyped_storage", "data_ptr", "size", "stride", "dim", "numel", "storage_offset", "element_size", "__len__"),
    *("is_contiguous", "is_floating_point", "get_device", "nelement"),
}
# These need no operator that could be seen.
_READ_BY_HOST = {Tensor.tolist, Tensor.numpy}
# Code that stands for kernels: what it reads of a tensor, no host reads.
STAND_INS = "sglang_dflash_cpu/"
_IS_CPU = Tensor.is_cpu
# Code that asks a tensor whether it is the host's, and is answered as on a GPU.
_GPU_BRANCHES = re.compile(r"/sglang_dflash/(worker|features|step)/|/sglang/srt/utils/common.py")
_IN_PLACE = re.compile(r"[a-z].*[a-z0-9]_|__i[a-z]+__|__setitem__")
_NO_CALLERS = re.compile(
    "/torch/|/triton/|/tests/rehearsal/(?!test_)|/host_waits.py|/contextlib.py|/plugins/hook_registry.py"
)
_OUTSIDE_OF_PACKAGE = re.compile(r".*/(?=(sglang_dflash_cpu|sglang_dflash|sglang|tests)/)")


@dataclass(frozen=True)
class Access:
    stream: Stream
    count: int
    place: str

    def before(self, seen: Clock) -> bool:
        return self.count <= seen.get(self.stream.id, 0)

    def __str__(self) -> str:
        return f"{self.place} [{self.stream.name}]"


@dataclass
class Memory:
    """One storage: who allocated it, its last write and the reads since, who keeps it from being reused."""

    owner: Stream
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)
    used: dict[int, Access] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    pinned: bool = False


class Watch:
    """What was found: ``races`` by description, ``refused`` by place, and the ``operators`` that were watched.

    With ``raises`` the first ends the process, where it is found. ``each_operator``: whether :class:`Operators` watches
    too. Without it the order of accesses is known of memory on the host, at every call; what is not known is the
    device's.
    """

    def __init__(self, *, each_operator: bool = True, raises: bool = False) -> None:
        self.races, self.refused = set[str](), set[str]()
        self.each_operator, self.raises = each_operator, raises
        self.operators = 0
        self.born_on_host = False  # where the running call's new tensors live
        self.copies_async = False  # whether a copy between host and device that it makes lets the host go on
        self._memory: dict[int, Memory] = {}
        self._freed: dict[int, list[Access]] = {}  # by the stream that may hand the memory out again

    def of(self, tensor: Tensor, owner: Stream | None = None) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = Memory(owner or current_stream())
            weakref.finalize(storage, self._free, key).atexit = False
        return self._memory[key]

    def from_numpy(self, array: Any) -> Tensor:
        """``torch.from_numpy``, which a function mode does not see: a host tensor, unless a stand-in makes it."""
        with torch._C.DisableTorchFunction():
            self.born_on_host = not _stands_in(sys._getframe(1))
            tensor = _from_numpy(array)
            if self.born_on_host:
                self.of(tensor, HOST)
        return tensor

    def on_host(self, tensor: Tensor) -> bool:
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        return memory is not None and memory.owner is HOST

    def is_pinned(self, tensor: Tensor) -> bool:
        return self.on_host(tensor) and self.of(tensor).pinned

    def pin(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """``tensor.pin_memory()``, a copy."""
        place = place_of_caller()
        if not self.on_host(tensor):
            self.refuse("pin", "pin_memory: only dense CPU tensors can be pinned", place)
        self.born_on_host = True
        with torch._C.DisableTorchFunction():
            pinned = tensor.clone()
        self.of(pinned, HOST).pinned = True
        return pinned

    def launch(self, kernel: str, tensors: list[Tensor]) -> None:
        """A kernel of Triton."""
        if any(map(self.on_host, tensors)):
            self.refuse("operands", f"{kernel}: cannot access a pointer (cpu tensor?)", place_of_caller())

    def refuse(self, kind: str, what: str, place: str) -> None:
        if is_refused(kind, place):
            self._found(self.refused, f"{kind}: {place}: {what}")

    def _found(self, kind: set[str], text: str) -> None:
        if text not in kind:
            print("DFLASH refused", text, file=sys.stderr, flush=True)
        kind.add(text)
        if self.raises:
            raise Refused(text)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """``tensor.record_stream(stream)``."""
        self.of(tensor).kept.add(stream.id)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """A copy by the current stream, for which the host does not wait."""
        self.born_on_host = self.copies_async = True
        with torch._C.DisableTorchFunction():
            host = tensor.clone()
            if not self.each_operator:
                self.operator("copy", [tensor], [], [host], waits=False)
            self.of(host, HOST).pinned = True
        self.copies_async = False
        return host

    def operator(
        self, name: str, reads: list[Tensor], writes: list[Tensor], fresh: list[Tensor], *, waits: bool
    ) -> None:
        """An operator, on the current stream if it touches the device. ``fresh`` tensors are allocated by it."""
        for tensor in fresh:
            self.of(tensor, HOST if self.born_on_host else current_stream())
        if fresh and not self.born_on_host and self.each_operator:
            self._hand_out_again(current_stream())
        touched = [*reads, *writes, *fresh]
        host = [tensor for tensor in touched if self.on_host(tensor)]
        stream = HOST if len(host) == len(touched) else current_stream()
        place = place_of_caller()
        stream.launch()
        self.operators += stream is not HOST
        access = Access(stream, stream.seen[stream.id], place)
        for tensor in reads:
            self._read(self.of(tensor), access)
        for tensor in (*writes, *fresh):
            self._write(self.of(tensor), access)
        mixed = stream is not HOST and any(tensor.dim() for tensor in host)
        if (mixed and not self.copies_async) or (waits and stream is not HOST):
            self.host_waits(stream, place)

    def call(self, name: str, given: list[Tensor], out: Any, results: list[Tensor]) -> None:
        """A call that touches memory on the host, of which operators are not watched one by one."""
        known = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in known]
        writes = [*given[:1]] if _IN_PLACE.fullmatch(name) else tensors_in(out)
        if results and not fresh and not writes:  # a view
            return
        written = {tensor.untyped_storage()._cdata for tensor in writes}
        reads = [tensor for tensor in given if tensor.untyped_storage()._cdata not in written]
        reads = [] if _METADATA_ONLY.match(f"aten::{name}") else reads
        self.operator(name, reads, writes, fresh, waits=False)

    def host_reads(self, tensor: Tensor, *, waits: bool) -> None:
        """``tolist`` and ``numpy``: of the device, after a copy that the host waits for."""
        place = place_of_caller()
        stream = HOST if self.on_host(tensor) else current_stream()
        stream.launch()
        self._read(self.of(tensor), Access(stream, stream.seen[stream.id], place))
        if stream is not HOST and waits:
            self.host_waits(stream, place)

    def host_waits(self, stream: Stream, place: str) -> None:
        if not place.startswith(STAND_INS):  # a stand-in is a kernel: it puts no accesses in order
            stream.synchronize()

    def _read(self, memory: Memory, access: Access) -> None:
        self._check(memory.write, access)
        memory.reads[access.stream.id] = memory.used[access.stream.id] = access

    def _write(self, memory: Memory, access: Access) -> None:
        for earlier in (memory.write, *memory.reads.values()):
            self._check(earlier, access)
        memory.write, memory.reads = access, {}
        memory.used[access.stream.id] = access

    def _check(self, earlier: Access | None, access: Access) -> None:
        if earlier is not None and not earlier.before(access.stream.seen):
            self._found(self.races, f"order: {earlier} and {access} in any order")

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        if memory.owner is not HOST and self.each_operator:  # PyTorch keeps pinned memory until its copies are done
            kept = {memory.owner.id, *memory.kept}
            pending = [access for stream, access in memory.used.items() if stream not in kept]
            self._freed.setdefault(memory.owner.id, []).extend(pending)

    def _hand_out_again(self, owner: Stream) -> None:
        join(owner.seen, HOST.seen)
        for access in self._freed.pop(owner.id, ()):
            if not access.before(owner.seen):
                self._found(self.races, f"order: {access} may use what [{owner.name}] has been given again")


_watching: list[Watch] = []


def on_host(tensor: Tensor) -> bool:
    """Whether the watch that runs, if one does, has the tensor on the host."""
    return bool(_watching) and _watching[-1].on_host(tensor)


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Watch what this thread does with tensors, with pinned memory and ``record_stream`` as on a GPU."""
    patched = {(torch, "from_numpy"): watch.from_numpy, (Tensor, "pin_memory"): _method(watch.pin)}
    patched[Tensor, "record_stream"] = _method(watch.keep)
    before = {place: getattr(*place) for place in patched}
    with contextlib.ExitStack() as modes:
        for (owner, name), function in patched.items():
            setattr(owner, name, function)
            modes.callback(setattr, owner, name, before[owner, name])
        if watch.each_operator:
            modes.enter_context(Operators(watch))
        modes.enter_context(Calls(watch))
        _watching.append(watch)
        modes.callback(_watching.pop)
        yield


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **options: function(tensor, *args, **options)


class Operators(EachOperator):
    """Enters every operator of PyTorch into the watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        reads, writes = [], []
        values = [*args, *(kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :])]
        for argument, value in zip(func._schema.arguments, values, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors_in(value))
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        results = tensors_in(result)
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in known]
        if func is torch.ops.aten.lift_fresh.default:  # ``torch.tensor``, which makes it unseen
            reads, fresh = [], results
        if results and not fresh and not writes:  # a view
            return result
        if _METADATA_ONLY.match(func._schema.name):
            reads = []
        self._watch.operator(func._schema.name, reads, writes, fresh, waits=waits(func, args, kwargs))
        return result


class Calls(TorchFunctionMode):
    """Knows of every call where its tensors live, makes the copies that a GPU makes, and refuses what CUDA refuses."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        watch, caller = self._watch, sys._getframe(1)
        stands_in = _stands_in(caller)
        if name in _ABOUT_A_TENSOR or (stands_in and not watch.each_operator):
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if name in ("__get__", "__set__"):
            return self._attribute(func, args)
        given = tensors_in((args, kwargs))
        moves = func in (Tensor.to, Tensor.cpu)
        target = _target(func, args, kwargs)
        on_host = [watch.on_host(tensor) for tensor in given]
        watch.born_on_host = all(on_host) if target is None else target
        if stands_in:
            watch.born_on_host = False
        else:
            kind, what = refusal(watch, func, args, kwargs, given, on_host, target)
            if kind:
                watch.refuse(kind, what, place_of_caller())
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:
            kwargs["pin_memory"] = False  # there is no device to pin it for
        born_on_host = watch.born_on_host
        watch.copies_async = bool(kwargs.get("non_blocking"))
        if func in _READ_BY_HOST:
            # No device gives numpy its memory: on a CPU, it is how a kernel is stood in for.
            watch.host_reads(given[0], waits=func is not Tensor.numpy)
        result = func(*args, **kwargs)
        if moves and target is not None and target != on_host[0]:
            same = result.untyped_storage()._cdata == given[0].untyped_storage()._cdata
            result = result.clone() if same else result
        watch.born_on_host = born_on_host
        touches_host = born_on_host or any(on_host)
        if touches_host and not watch.each_operator and func not in _READ_BY_HOST:
            watch.call(name, given, kwargs.get("out"), tensors_in(result))
        for tensor in tensors_in(result) if pinned else ():
            watch.of(tensor, HOST).pinned = True
        watch.copies_async = False
        return result

    def _attribute(self, func: Any, args: Any) -> Any:
        if func.__self__ is _IS_CPU and _GPU_BRANCHES.search(sys._getframe(2).f_code.co_filename):
            return self._watch.on_host(args[0])
        return func(*args)


def _target(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Whether the call asks for the host (True), for the device (False), or names neither."""
    if func is Tensor.cpu:
        return True
    named = kwargs.get("device")
    if named is None and func is Tensor.to:
        named = next((each for each in args[1:] if isinstance(each, str | torch.device)), None)
    return None if named is None else _says_cpu(sys._getframe(2))


def _stands_in(frame: FrameType) -> bool:
    return f"/{STAND_INS}" in frame.f_code.co_filename


def _says_cpu(frame: FrameType) -> bool:
    """Whether the call is written with the word "cpu": a variable that holds it means the device."""
    first, last, start, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    lines = linecache.getlines(frame.f_code.co_filename)[(first or 1) - 1 : last or 1]
    if lines and None not in (start, end):
        lines[-1] = lines[-1].encode()[:end].decode()
        lines[0] = lines[0].encode()[start:].decode()
    text = "".join(lines)
    return '"cpu"' in text or "'cpu'" in text


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of nested containers; SGLang's lists and tuples have types that PyTorch's trees do not enter."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def place_of_caller() -> str:
    """File, line and function of the innermost frame outside PyTorch, Triton and what watches."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _NO_CALLERS.search(frame.f_code.co_filename):
        frame = frame.f_back
    assert frame is not None
    return f"{_OUTSIDE_OF_PACKAGE.sub('', frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
