"""Compare the kernels of a state replay with their definitions, at the start on the serving device.

A miscompiled kernel would produce wrong tokens and no other sign. One random block runs in the pool's memory, at the
padding row and slot; the definition runs on the host, without TF32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.ops import runs_kernels
from sglang_dflash.plan.settings import REPLAY_SWITCH as SWITCH
from sglang_dflash.states import reference, replay
from sglang_dflash.states.reference import Records

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import ModelRunner

logger = logging.getLogger(__name__)

LAYERS = 2  # shows a wrong layer stride
# of the largest value: a product in one TF32 part is off by 2 ** -11
FLOAT32_TOLERANCE = 2**-12


@torch.no_grad()
def check_replay(runner: ModelRunner, width: int) -> None:
    """Check ``gdn_verify`` and ``gdn_commit`` on the target's pools, where kernels run.

    Raises:
        DFlashError: a kernel cannot run on this device, or its results differ from the definition's.
    """
    states = runner.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    if not runs_kernels(states.temporal):
        return
    from triton.errors import TritonError  # not installed where no kernel runs

    records = replay.pool_records(states)
    pool = Pool(states.temporal[:LAYERS], Records(*(part[:LAYERS] for part in records.parts)))
    used = [pool.states[:, :2], *(part[:, :1] for part in pool.records.parts)]
    before = [part.clone() for part in used]
    try:
        faults = list(_faults(pool, runner.dtype, width))
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError) as error:
        raise _refusal(f"the kernels of a state replay do not run on this device: {error}") from error
    finally:
        for part, values in zip(used, before, strict=True):
            part.copy_(values)
    if faults:
        raise _refusal(f"on this device, kernels of a state replay differ from their definition: {'; '.join(faults)}")
    logger.info("DFLASH: the kernels of the state replay equal their definition")


def _refusal(found: str) -> DFlashError:
    return DFlashError(
        found,
        expected=f"differences below {FLOAT32_TOLERANCE:.1e} of the largest value, or two roundings to 16 bits",
        remedy=f"start with {SWITCH}=0, which keeps every state of a block, and report the device and the versions of "
        "torch and Triton",
    )


class Pool(NamedTuple):
    """States ``[layers, slots, HV, V, K]`` and records of SGLang's first layers, or a copy on the host."""

    states: Tensor
    records: Records

    def on_host(self) -> Pool:
        """Slots 0 and 1 and row 0, behind a padding slot and row, to which the definition writes."""

        def behind_padding(part: Tensor, count: int) -> Tensor:
            return torch.cat([torch.zeros_like(part[:, :1]), part[:, :count]], 1).cpu()

        parts = (behind_padding(part, 1) for part in self.records.parts)
        return Pool(behind_padding(self.states, 2), Records(*parts))

    def layer(self, index: int) -> Records:
        return Records(*(part[index] for part in self.records.parts))


# a padding request, and one at row 0 and slot 0 with a snapshot in slot 1
SLOTS, HOST_SLOTS = torch.tensor([-1, 0], dtype=torch.int32), torch.tensor([-1, 1])
ROWS, HOST_ROWS = torch.tensor([0, 0]), torch.tensor([0, 1])
TRACK_SLOTS, HOST_TRACK_SLOTS = torch.tensor([-1, 1]), torch.tensor([0, 2])


def _faults(pool: Pool, dtype: torch.dtype, width: int) -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    pool.states[:, :2].copy_(torch.randn(pool.states[:, :2].shape, generator=generator))
    yield from _faults_of_verify(pool, dtype, width, generator)
    yield from _faults_of_commit(pool, "without", max(1, width // 2), None)
    yield from _faults_of_commit(pool, "with", width, max(1, width // 2))


def _faults_of_verify(pool: Pool, dtype: torch.dtype, width: int, generator: torch.Generator) -> Iterator[str]:
    host, device, scale = pool.on_host(), pool.states.device, pool.states.shape[-1] ** -0.5
    slots, rows = SLOTS.to(device), ROWS.to(device)
    served: Any = {"width": width, "scale": scale, "round_beta": replay.decode_rounds_beta()}
    for layer, (states, host_states) in enumerate(zip(pool.states, host.states, strict=True)):
        records, host_records = pool.layer(layer), host.layer(layer)
        projected, gates = _inputs(pool, dtype, width, generator)
        q, k, v = _split(pool, projected.to(device))
        on_device = (gate.to(device) for gate in gates)
        found = replay.gdn_verify(*(q, k, v, *on_device, states, slots, records, rows), **served)
        q, k, v = _split(pool, projected)
        expected = reference.gdn_verify(*(q, k, v, *gates, host_states, HOST_SLOTS, host_records, HOST_ROWS), **served)
        yield from _difference("outputs of gdn_verify", found, expected)
        for name in ("updates", "keys"):
            yield from _difference(f"{name} of gdn_verify", _whole(records, name)[0], _whole(host_records, name)[1])
        yield from _difference("decays of gdn_verify", records.decays[0], host_records.decays[1])


def _faults_of_commit(pool: Pool, snapshot: str, count: int, track_count: int | None) -> Iterator[str]:
    host, device = pool.on_host(), pool.states.device
    counts = torch.tensor([0, count], dtype=torch.int32)
    track: tuple[Tensor | None, Tensor | None] = (None, None)
    host_track = track
    if track_count is not None:
        track_counts = torch.tensor([0, track_count])
        track, host_track = (TRACK_SLOTS.to(device), track_counts.to(device)), (HOST_TRACK_SLOTS, track_counts)
    replay.gdn_commit(pool.states, pool.records, ROWS.to(device), SLOTS.to(device), counts.to(device), *track)
    reference.gdn_commit(host.states, host.records, HOST_ROWS, HOST_SLOTS, counts, *host_track)
    yield from _difference(f"states of gdn_commit, {snapshot} a snapshot", pool.states[:, :2], host.states[:, 1:])


def _inputs(pool: Pool, dtype: torch.dtype, width: int, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    # sigmoids of ``b`` are far from the rounding boundaries of 16 bits
    _, _, HV, V, K = pool.states.shape
    tokens, size = 2 * width, 2 * pool.records.keys.shape[2] * K + HV * V
    projected = torch.randn(tokens, size, generator=generator).to(dtype)
    a = torch.randn(tokens, HV, generator=generator).to(dtype)
    b = (torch.randint(-4, 4, (tokens, HV), generator=generator) / 2).to(dtype)
    return projected, [a, b, torch.rand(HV, generator=generator).log(), torch.randn(HV, generator=generator)]


def _split(pool: Pool, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    H, (_, _, HV, V, K) = pool.records.keys.shape[2], pool.states.shape
    q, k, v = projected.split([H * K, H * K, HV * V], -1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def _whole(records: Records, name: str) -> Tensor:
    high, low = getattr(records, name).float(), getattr(records, f"{name}_low")
    return high if low is None else high + low.float()


def _difference(name: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    tolerance = FLOAT32_TOLERANCE if found.dtype == torch.float32 else 2 * torch.finfo(found.dtype).eps
    found, expected = found.cpu().float(), expected.float()
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= tolerance * largest:  # true for NaN
        yield f"{name} by {difference:.2g} of {largest:.2g}"
