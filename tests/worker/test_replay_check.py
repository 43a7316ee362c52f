"""The start-up check of the replay kernels: a wrong kernel stops the server, and the pool does not change."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.settings import REPLAY_SWITCH as SWITCH
from sglang_dflash.states import reference, replay
from sglang_dflash.worker.start import replay_check
from sglang_dflash.worker.start.replay_check import check_replay
from tests.support.gdn_replay import server_pool

WIDTH = 5


def gdn_verify(*inputs: Any, width: int, scale: float) -> Any:
    """The definition in place of the kernel; skips padding."""
    *per_token, A_log, dt_bias, states, slots, records, rows = inputs
    live = slots >= 0
    tokens = live.repeat_interleave(width)
    outputs = torch.zeros_like(per_token[2])
    parts = (*(x[tokens] for x in per_token), A_log, dt_bias, states, slots[live], records, rows[live])
    outputs[tokens] = reference.gdn_verify(*parts, width=width, scale=scale)
    return outputs


def gdn_commit(states: Any, records: Any, rows: Any, slots: Any, counts: Any, *track: Any) -> None:
    """The same for the commit; the snapshot is taken before the state advances."""
    live = (slots >= 0) & (counts > 0)
    if track[0] is not None:
        snapshot = states[:, slots[live]].clone()
        reference.gdn_commit(states, records, rows[live], slots[live], track[1][live])
        states[:, track[0][live]] = states[:, slots[live]]
        states[:, slots[live]] = snapshot
    reference.gdn_commit(states, records, rows[live], slots[live], counts[live])


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_check, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(replay, "gdn_verify", gdn_verify)
    monkeypatch.setattr(replay, "gdn_commit", gdn_commit)


def runner(dtype: torch.dtype = torch.bfloat16, state_dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(dtype=dtype, req_to_token_pool=server_pool(dtype, state_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_right_kernels_pass_and_the_pool_does_not_change(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    server = runner(dtype, state_dtype)
    states = server.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    tensors = [value for value in vars(states).values() if value is not None]
    before = [tensor.clone() for tensor in tensors]
    check_replay(server, WIDTH)
    assert all(map(torch.equal, tensors, before))


def forgets_the_decay(*inputs: Any, **options: Any) -> Any:
    q, k, v, a, *others = inputs
    return gdn_verify(q, k, v, torch.full_like(a, -30.0), *others, **options)


def takes_another_requests_inputs(*inputs: Any, **options: Any) -> Any:
    return gdn_verify(*(x.roll(options["width"], 0) for x in inputs[:5]), *inputs[5:], **options)


def leaves_a_nan(*inputs: Any, **options: Any) -> Any:
    outputs = gdn_verify(*inputs, **options)
    outputs[-1, -1, -1] = torch.nan
    return outputs


def loses_low_parts(*inputs: Any, **options: Any) -> Any:
    outputs, records = gdn_verify(*inputs, **options), inputs[9]
    records.updates_low.zero_()
    return outputs


def commits_one_token_less(states: Any, records: Any, rows: Any, slots: Any, counts: Any, *track: Any) -> None:
    gdn_commit(states, records, rows, slots, counts - 1, *track)


def tracks_the_last_token(states: Any, records: Any, rows: Any, slots: Any, counts: Any, *track: Any) -> None:
    gdn_commit(states, records, rows, slots, counts, track[0], track[0] if track[0] is None else counts)


def commits_one_layer(states: Any, records: Any, *others: Any) -> None:
    first = reference.Records(*(part[:1] for part in records.parts))
    gdn_commit(states[:1], first, *others)


def fails(*inputs: Any, **options: Any) -> Any:
    raise RuntimeError("Triton Error [CUDA]: invalid argument")


@pytest.mark.parametrize(
    ("name", "wrong", "found"),
    [
        ("gdn_verify", forgets_the_decay, "outputs of gdn_verify"),
        ("gdn_verify", takes_another_requests_inputs, "updates of gdn_verify"),
        ("gdn_verify", leaves_a_nan, "outputs of gdn_verify by nan"),
        ("gdn_verify", loses_low_parts, "updates of gdn_verify"),
        ("gdn_commit", commits_one_token_less, "without a snapshot"),
        ("gdn_commit", tracks_the_last_token, "with a snapshot"),
        ("gdn_commit", commits_one_layer, "states of gdn_commit"),
        ("gdn_verify", fails, "do not run on this device: Triton Error"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_wrong_kernel_stops_the_start(
    name: str, wrong: Callable[..., Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, name, wrong)
    with pytest.raises(DFlashError) as caught:
        check_replay(runner(), WIDTH)
    assert found in caught.value.value and f"{SWITCH}=0" in caught.value.remedy


def test_an_out_of_memory_error_does_not_blame_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_memory(*inputs: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(replay, "gdn_verify", lacks_memory)
    with pytest.raises(torch.OutOfMemoryError):
        check_replay(runner(), WIDTH)
