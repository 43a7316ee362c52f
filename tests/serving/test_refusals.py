"""A launch that cannot work ends the process before it loads weights, with one error that says why.

The same errors, and all others, without a process: tests/cpu, tests/plan, tests/states.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch

from tests.support.broken_pairs import BROKEN, write_pair
from tests.support.pair_servers import changed_drafter, draft_arguments, plain_server, target_arguments
from tests.support.servers import run_to_exit

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"


def mask_token(folder: Path) -> tuple[str, ...]:
    (broken,) = (pair for pair in BROKEN if pair.name == 'drafter mask_token_id "<|MASK|>"')
    write_pair(folder, broken)
    pair = ("--model-path", str(folder / "target"), "--speculative-draft-model-path", str(folder / "drafter"))
    return (*pair, "--speculative-algorithm", "DFLASH")


def misfitting_tensors(folder: Path) -> tuple[str, ...]:
    drafter = changed_drafter(PAIR, folder)
    (weights,) = drafter.glob("*.safetensors")
    tensors = safetensors.torch.load_file(weights)
    del tensors["layers.0.self_attn.q_norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    tensors["extra.weight"] = tensors["norm.weight"].clone()
    safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    return (*target_arguments(PAIR), *draft_arguments(PAIR, drafter))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(mask_token, ["mask_token_id is '<|MASK|>'"], id="mask token"),
        pytest.param(
            misfitting_tensors,
            ["missing: fc.weight, layers.0", "unexpected: extra.weight", "mis-shaped: fc.weight"],
            id="misfitting tensors",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_process_ends_with_the_error(
    arguments: Callable[[Path], tuple[str, ...]], said: list[str], tmp_path: Path
) -> None:
    status, printed = run_to_exit(*arguments(tmp_path), timeout=120)
    assert status not in (0, None)
    (error,) = {line.partition("sglang-dflash:")[2] for line in printed.splitlines() if "sglang-dflash:" in line}
    for words in (*said, "Expected:", "Remedy:"):
        assert words in error
    assert "Load weight" not in printed


@pytest.mark.slow
def test_plain_decoding_is_left_alone(tmp_path: Path) -> None:
    with plain_server(PAIR, tmp_path) as server:
        assert "sglang_dflash" not in server.get("/server_info").json()["internal_states"][0]
        assert "serves DFLASH" not in server.log
