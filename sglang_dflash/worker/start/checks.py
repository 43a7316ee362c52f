"""Compare the kernels of a state replay with their definitions, at the start on the serving device.

A miscompiled kernel would only show in wrong tokens. One random block runs on a small pool like the server's. The
definition runs on a copy of it on the host, without TF32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.settings import BUILTIN, SWITCH
from sglang_dflash.ops import runs_kernels
from sglang_dflash.states import reference, replay, verify
from sglang_dflash.states.reference import Records

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

LAYERS = 2  # so that a wrong layer stride is found
# relative to the largest value: a product in one TF32 part differs by 2 ** -11
FLOAT32_TOLERANCE = 2**-12
# a padding request, and one at row 1 and slot 1 with a snapshot in slot 2; the definition writes padding to 0
SLOTS, ROWS, TRACK_SLOTS = torch.tensor([-1, 1], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([-1, 2])


@torch.no_grad()
def check_replay(runner: ModelRunner, width: int) -> None:
    """Check ``gdn_convolve``, ``gdn_verify`` and ``gdn_commit`` with the sizes of the target's pools.

    Raises:
        DFlashError: a kernel cannot run on this device, or its results differ from the definition's.
    """
    served = runner.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    if not runs_kernels(served.temporal):
        return
    from triton.errors import TritonError  # not installed where no kernel runs

    try:
        faults = list(_faults(served, runner.dtype, width))
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError) as error:
        raise _refusal(f"the kernels of a state replay do not run on this device: {error}") from error
    if faults:
        raise _refusal(f"on this device, kernels of a state replay differ from their definition: {'; '.join(faults)}")


def _refusal(found: str) -> DFlashError:
    return DFlashError(
        found, remedy=f"start with {SWITCH}={BUILTIN}, and report the device and the versions of torch and Triton"
    )


def _faults(served: Any, dtype: torch.dtype, width: int) -> Iterator[str]:
    generator, device = torch.Generator().manual_seed(0), served.temporal.device
    yield from _convolution(served, dtype, width, generator)
    # the pool: states [layers, slots, HV, V, K], and the parts of the records
    parts, shape = replay.pool_records(served).parts, (LAYERS, 3, *served.temporal.shape[2:])
    host = [torch.randn(shape, generator=generator).to(served.temporal.dtype)]
    host += [torch.zeros(LAYERS, 2, *part.shape[2:], dtype=part.dtype) for part in parts]
    pool = [part.to(device, copy=True) for part in host]
    for layer in range(LAYERS):
        inputs = _inputs(host, dtype, width, generator)
        out, records = _verified(replay.gdn_verify, inputs, [part[layer] for part in pool], width)
        expected, of_host = _verified(reference.gdn_verify, inputs, [part[layer] for part in host], width)
        yield from _difference("outputs of gdn_verify", out, expected)
        for name in ("updates", "keys", "decays"):
            yield from _difference(f"{name} of gdn_verify", _whole(records, name), _whole(of_host, name))
    half = max(1, width // 2)
    for snapshot, counts in (("without", [half]), ("with", [width, half])):
        host, given = [part.to("cpu", copy=True) for part in pool], [ROWS]
        for slots, count in zip((SLOTS, TRACK_SLOTS), counts, strict=False):
            given += [slots, torch.tensor([0, count], dtype=torch.int32)]
        replay.gdn_commit(pool[0], Records(*pool[1:]), *(each.to(device) for each in given))
        reference.gdn_commit(host[0], Records(*host[1:]), *given)
        yield from _difference(f"states of gdn_commit, {snapshot} a snapshot", pool[0][:, 1:], host[0][:, 1:])


def _convolution(served: Any, dtype: torch.dtype, width: int, generator: torch.Generator) -> Iterator[str]:
    recurrent, windows = served.temporal[0], served.intermediate_conv_window[0][0, :2]
    (_, _, dim, before), (_, HV, V, _) = windows.shape, recurrent.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, (b, a), weight = normal(2 * width, dim + HV * V), normal(2 * width, 2 * HV).chunk(2, -1), normal(dim, before + 1)
    inputs, results = (x, a, b, weight, normal(2, dim, before).to(windows.dtype), SLOTS, ROWS), []
    operations: tuple[Any, ...] = verify.gdn_convolve, reference.gdn_convolve
    for operation, device in zip(operations, (windows.device, "cpu"), strict=True):
        *projected, states, slots, rows = (each.to(device) for each in inputs)
        memory = torch.zeros(2 * windows.stride(0), dtype=windows.dtype, device=device)
        pool = states, slots, memory.as_strided(windows.shape, windows.stride()), rows
        results.append((*operation(*projected, None, *pool, width=width, recurrent=recurrent), memory))
    (mixed, *copied), (expected, *others) = results
    yield from _difference("outputs of gdn_convolve", mixed, expected)
    for name, one, other in zip(("z", "a", "b", "windows"), copied, others, strict=True):
        if not torch.equal(one.cpu(), other):
            yield f"{name} of gdn_convolve"


def _inputs(host: list[Tensor], dtype: torch.dtype, width: int, generator: torch.Generator) -> list[Tensor]:
    # q, k and v as parts of one projection, a, b, A_log and dt_bias
    (_, _, HV, V, K), (_, _, H, *_), tokens = host[0].shape, host[2].shape, 2 * width
    projected = torch.randn(tokens, 2 * H * K + HV * V, generator=generator).to(dtype)
    a = torch.randn(tokens, HV, generator=generator).to(dtype)
    # the sigmoids of these are far from the rounding boundaries of 16 bits
    b = (torch.randint(-4, 4, (tokens, HV), generator=generator) / 2).to(dtype)
    return [projected, a, b, torch.rand(HV, generator=generator).log(), torch.randn(HV, generator=generator)]


def _verified(operation: Any, inputs: list[Tensor], pool: list[Tensor], width: int) -> tuple[Tensor, Records]:
    # the outputs of one layer, and the records of the request
    (states, *parts), (HV, V, K), H = pool, pool[0].shape[1:], pool[2].shape[1]
    projected, *gates, slots, rows = (each.to(states.device) for each in (*inputs, SLOTS, ROWS))
    q, k, v = projected.split([H * K, H * K, HV * V], -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    options = {"width": width, "scale": K**-0.5, "round_beta": replay.decode_rounds_beta()}
    out = operation(q, k, v, *gates, states, slots, Records(*parts), rows, **options)
    return out, Records(*(part[1] for part in parts))


def _whole(records: Records, name: str) -> Tensor:
    high, low = getattr(records, name).float(), getattr(records, f"{name}_low", None)
    return high if low is None else high + low.float()


def _difference(name: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    tolerance = FLOAT32_TOLERANCE if found.dtype == torch.float32 else 2 * torch.finfo(found.dtype).eps
    found, expected = found.cpu().float(), expected.float()
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= tolerance * largest:  # true for NaN
        yield f"{name} by {difference:.2g} of {largest:.2g}"
