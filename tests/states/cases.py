"""The Triton kernels of the gated delta net's replay against their torch definitions, also as a server checks them.

Not collected by itself: tests/ops/test_triton.py runs it under Triton's interpreter (``TRITON_INTERPRET=1``);
on a device it runs with ``OPS_DEVICE=cuda``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.states import reference, replay, verify
from sglang_dflash.states.convolution import gdn_convolve
from sglang_dflash.states.kernels import gdn_commit, gdn_verify
from sglang_dflash.states.reference import Records
from sglang_dflash.states.replay import windows_by_token
from sglang_dflash.worker.start import checks
from tests.ops.device import DEVICE
from tests.support.gdn_replay import RING, Blocks, alike, decode_with_triton, of_records

# Of a result's largest value. The definition keeps an fp32 state whole, the kernel in two 16-bit parts.
OF_VALUES = {torch.float32: 3e-6, torch.bfloat16: 3e-5, torch.float16: 3e-5}
OF_OUTPUTS = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    bound = tolerance * expected[~expected.isnan()].abs().max().float().item()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=bound, equal_nan=True)


def check(blocks: Blocks, counts: list[int], track_counts: list[int] | None) -> None:
    expected, actual = of_records(blocks.records, Tensor.clone), blocks.records
    assert_near(
        blocks.verify(gdn_verify, actual), blocks.verify(reference.gdn_verify, expected), OF_OUTPUTS[blocks.dtype]
    )
    live = blocks.rows.unique()
    for name in ("updates", "keys"):
        # High and low part together: where they are cut is a matter of the last bit.
        assert_near(whole(actual, name)[:, live], whole(expected, name)[:, live], OF_VALUES[blocks.dtype])
    assert_near(actual.decays[:, live], expected.decays[:, live], 1e-6)
    assert actual.updates[:, 0].isnan().all(), "padding has no row to write to"

    track = (None, None) if track_counts is None else (blocks.track_slots, torch.tensor(track_counts, device=DEVICE))
    taken = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    pool, before = blocks.states.clone(), blocks.states.clone()
    reference.gdn_commit(pool, actual, blocks.rows, blocks.slots, taken, *track)
    gdn_commit(blocks.states, actual, blocks.rows, blocks.slots, taken, *track)
    tolerance = OF_VALUES[torch.float32] if blocks.state_dtype == torch.float32 else OF_OUTPUTS[blocks.state_dtype]
    assert_near(blocks.states[:, 1:], pool[:, 1:], tolerance)
    same = (pool == before).flatten(2).all(-1)
    same[:, 0] = False  # there the definition writes what has nowhere to go
    assert torch.equal(blocks.states[same], before[same])


def whole(records: Records, name: str) -> Tensor:
    low = getattr(records, f"{name}_low")
    return getattr(records, name).float() + (0 if low is None else low.float())


# dtypes of activations and states
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]
# bs, width, H, HV, K, V: few values, several tiles of a state, no powers of two, a wide block
FEW, *SHAPES = (
    (2, 16, 1, 3, 16, 16),
    (1, 7, 2, 2, 128, 128),
    (2, 1, 1, 2, 24, 72),
    (1, 5, 1, 1, 96, 8),
    (1, 29, 1, 2, 24, 24),
)


@pytest.mark.parametrize(("shape", "dtypes"), [*product([FEW], DTYPES), *product(SHAPES, DTYPES[1:3])])
def test_a_block_and_its_commit(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    (bs, width, H, HV, K, V), (dtype, state_dtype) = shape, dtypes
    blocks = Blocks(
        bs, width, H=H, HV=HV, K=K, V=V, dtype=dtype, state_dtype=state_dtype, padded=bs > 1, device=DEVICE,
        round_beta=dtype == state_dtype,
    )  # fmt: skip
    check(blocks, [width, width // 2, 0, -1][: blocks.bs], [1, width, -1, 2][: blocks.bs])


def test_without_tracking() -> None:
    check(Blocks(3, 4, device=DEVICE), [4, 0, 2], None)


def test_a_strong_decay_and_equal_keys_cost_no_precision() -> None:
    decaying = Blocks(1, RING, device=DEVICE)
    decaying.make_first_decay_strong()
    for blocks in (decaying, *(alike(1, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16))):
        check(blocks, [RING], [9])


def test_no_requests() -> None:
    blocks = Blocks(0, 4, device=DEVICE)
    assert blocks.verify(gdn_verify, blocks.records).shape == (2, 0, 4, 6)
    gdn_commit(blocks.states, blocks.records, blocks.rows, blocks.slots, blocks.slots)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs the kernels, and decodes with Triton's, which rounds beta."""
    decode_with_triton(monkeypatch)
    monkeypatch.setattr(checks, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(replay, "gdn_verify", gdn_verify)
    monkeypatch.setattr(replay, "gdn_commit", gdn_commit)
    monkeypatch.setattr(verify, "gdn_convolve", gdn_convolve)


def runner(dtype: torch.dtype, state_dtype: torch.dtype, size: int) -> Any:
    blocks = Blocks(1, RING, H=1, HV=2, K=size, V=size, dtype=dtype, state_dtype=state_dtype, device=DEVICE)
    cache, dim = blocks.cache(), 4 * size
    columns = torch.zeros(2, 2, dim, RING + 2, dtype=dtype, device=DEVICE)  # of overlapping windows
    windows = columns.as_strided((2, 2, RING, dim, 3), (*columns.stride()[:2], 1, RING + 2, 1))
    cache.conv, cache.intermediate_conv_window = [columns[..., :3]], [windows_by_token(windows)]
    pool = SimpleNamespace(get_speculative_mamba2_params_all_layers=lambda: cache)
    return SimpleNamespace(dtype=dtype, req_to_token_pool=pool)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES[2:])
def test_the_check_at_the_start_passes(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    checks.check_replay(runner(dtype, state_dtype, 64), RING)


def forgets_the_decay(*inputs: Any, **options: Any) -> Any:
    q, k, v, a, *others = inputs
    return gdn_verify(q, k, v, torch.full_like(a, -30.0), *others, **options)


def leaves_a_nan(*inputs: Any, **options: Any) -> Any:
    outputs = gdn_verify(*inputs, **options)
    outputs[-1, -1, -1] = torch.nan
    return outputs


def commits_one_token_less(states: Any, records: Any, rows: Any, slots: Any, counts: Any, *track: Any) -> None:
    gdn_commit(states, records, rows, slots, counts - 1, *track)


def convolves_another_tap(x: Any, a: Any, b: Any, weight: Any, *others: Any, **options: Any) -> Any:
    return gdn_convolve(x, a, b, weight.roll(1, 1), *others, **options)


def convolves_into_the_next_row(*inputs: Any, **options: Any) -> Any:
    *others, windows, rows = inputs
    return gdn_convolve(*others, windows, rows.flip(0), **options)


FAILS = Mock(side_effect=RuntimeError("Triton Error [CUDA]: invalid argument"))
LACKS_MEMORY = Mock(side_effect=torch.OutOfMemoryError)  # no fault of the kernels


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("module", "kernel", "wrong", "found"),
    [
        (replay, "gdn_verify", forgets_the_decay, "outputs of gdn_verify"),
        (replay, "gdn_verify", leaves_a_nan, "outputs of gdn_verify by nan"),
        (replay, "gdn_commit", commits_one_token_less, "without a snapshot"),
        (verify, "gdn_convolve", convolves_another_tap, "outputs of gdn_convolve"),
        (verify, "gdn_convolve", convolves_into_the_next_row, "windows of gdn_convolve"),
        (replay, "gdn_verify", FAILS, "do not run on this device: Triton Error"),
        (replay, "gdn_verify", LACKS_MEMORY, None),
    ],
)
def test_a_wrong_kernel_stops_the_start(
    module: ModuleType, kernel: str, wrong: Callable[..., Any], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, kernel, wrong)
    with pytest.raises(DFlashError if found else torch.OutOfMemoryError) as caught:
        checks.check_replay(runner(torch.bfloat16, torch.float32, 16), 5)
    if found:
        assert found in caught.value.problem and "SGLANG_DFLASH=builtin" in caught.value.remedy
