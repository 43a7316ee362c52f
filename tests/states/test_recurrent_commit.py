"""Which steps snapshot recurrent states for the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("sglang")

from sglang_dflash.states import commit as commit_module
from sglang_dflash.states.commit import RecurrentCommit, may_cross

pytestmark = pytest.mark.sglang


@given(
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=4),
    gained=st.data(),
    growth=st.integers(1, 64),
    interval=st.sampled_from([1, 16, 64, 256]),
)
def test_no_crossing_is_missed(lengths: list[int], gained: st.DataObject, growth: int, interval: int) -> None:
    """Wherever in the growth a step begins and ends."""
    for length in lengths:
        before = length + gained.draw(st.integers(0, growth))
        after = gained.draw(st.integers(before, length + growth))
        if before // interval != after // interval:
            assert may_cross(lengths, growth, interval)


class Launches(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_later_step_builds_no_index_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain's rows are the same at every step, also at another width."""
    handed: list[Any] = []
    monkeypatch.setattr(commit_module, "commit_mamba_states_after_verify", lambda *_, **options: handed.append(options))
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=object()))
    commit = RecurrentCommit(SimpleNamespace(model_runner=runner, device="cpu"))
    for width, launches in ((8, None), (8, Launches()), (4, Launches())):
        step: Any = SimpleNamespace(
            batch=SimpleNamespace(mamba_track_indices=None),
            accepted=SimpleNamespace(accept_lens=torch.tensor([3, 1], dtype=torch.int32)),
            tokens=torch.zeros(2, width),
            width=width,
        )
        if launches is None:
            commit(step)
        else:
            with launches:
                commit(step)
            assert "aten::arange" not in launches.names
        rows = [[i * width + j for j in range(width)] for i in range(2)]
        assert handed[-1]["accept_index"].tolist() == rows
        assert handed[-1]["prepared_step_indices"][0].tolist() == [2, 0]
