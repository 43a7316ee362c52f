"""What stands in for SGLang's replay kernels: no cursor decides anything, and SGLang's own worker keeps them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from torch import Tensor

from sglang_dflash.states import replay
from tests.support.plan import serve

pytestmark = pytest.mark.sglang

LAYERS, SLOTS, ROWS, H, HV, K, V, RING, WIDTH = 2, 6, 4, 2, 4, 8, 8, 16, 5
CURSORS = ("write_pos", "cache_base", "is_flush")


@pytest.fixture(autouse=True)
def our_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)


def refuse(**_: Any) -> None:
    raise AssertionError("SGLang's own kernel was called")


def step(cursors: dict[str, Tensor], accepted: tuple[int, int] = (4, 2)) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A verify and a commit of two requests as SGLang calls them -> outputs, states, cursors."""
    torch.manual_seed(0)
    states = torch.randn(LAYERS, SLOTS, HV, V, K)
    rings = {
        "d_cache": torch.full((LAYERS, ROWS, HV, RING, V), float("nan")),
        "k_cache": torch.full((LAYERS, ROWS, H, RING, K), float("nan")),
        "g_cache": torch.full((LAYERS, ROWS, HV, RING), float("nan")),
    }
    cursors = {name: cursor.clone() for name, cursor in cursors.items()}
    slots, rows, tokens = torch.tensor([3, 1]), torch.tensor([2, 1]), 2 * WIDTH
    outputs = []
    for layer in range(LAYERS):
        out = torch.empty(tokens, HV, V)
        replay.verify(
            refuse,
            q=torch.randn(tokens, H, K),
            k=torch.randn(tokens, H, K),
            v=torch.randn(tokens, HV, V),
            a=torch.randn(tokens, HV),
            b=torch.randn(tokens, HV),
            A_log=torch.rand(HV),
            dt_bias=torch.rand(HV),
            checkpoint_state=states[layer],
            **{name: ring[layer] for name, ring in rings.items()},
            rawv_cache=None,
            rawk_cache=None,
            out=out,
            ssm_state_indices=slots,
            replay_indices=rows,
            **cursors,
            max_spec_len=WIDTH,
            scale=K**-0.5,
        )
        outputs.append(out)
    replay.advance(refuse, **cursors, num_accepted=torch.tensor(accepted), replay_indices=rows)
    replay.commit(
        refuse,
        checkpoint_state=states,
        **rings,
        d_residual_cache=None,
        k_residual_cache=None,
        state_batch_indices=slots,
        replay_indices=rows,
        **cursors,
        accept_lens=torch.tensor(accepted),
        mamba_track_indices=torch.tensor([5, 4]),
        mamba_steps_to_track=torch.tensor([1, -1]),
    )
    return torch.stack(outputs), states, cursors


def cursors(value: int) -> dict[str, Tensor]:
    return {name: torch.full((ROWS,), value, dtype=torch.int32) for name in CURSORS}


def test_what_a_rows_last_owner_left_in_a_cursor_changes_nothing() -> None:
    """With overlap, an ended request's commit may come after SGLang has zeroed its row for the next one."""
    fresh, stale = step(cursors(0)), step(cursors(7))
    assert torch.equal(fresh[0], stale[0]) and torch.equal(fresh[1], stale[1])
    assert not any(cursor.any() for cursor in fresh[2].values()), "a cursor was moved"


def test_a_commit_leaves_nothing_for_the_next_block_whatever_its_width() -> None:
    """The state after 4 and 2 tokens, and after 2 in the first one's track slot; all else as it was."""
    before = torch.manual_seed(0) and torch.randn(LAYERS, SLOTS, HV, V, K)
    _, states, _ = step(cursors(0))
    changed = {slot for slot in range(1, SLOTS) if not torch.equal(states[:, slot], before[:, slot])}
    assert changed == {1, 3, 5}
    assert not states.isnan().any()
    after_two = step(cursors(0), (2, 2))[1][:, 3]
    torch.testing.assert_close(states[:, 5], after_two)
