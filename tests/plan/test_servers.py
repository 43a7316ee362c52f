"""``sglang-dflash check`` knows what the server will allocate for each shipped pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.memory import allocated, assert_as_estimated, estimated
from tests.support.servers import running

pytestmark = pytest.mark.engine

SIZES = (
    *("--max-total-tokens", "3000"),
    *("--max-mamba-cache-size", "60"),
    *("--max-running-requests", "8"),
    *("--speculative-num-draft-tokens", "12"),
)
DECODES = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "flags"),
    [
        ("tiny-dense", ("--dtype", "float32")),
        ("tiny-hybrid", ("--dtype", "bfloat16", "--mamba-radix-cache-strategy", "extra_buffer")),
        ("tiny-moe", ("--dtype", "float32", "--mamba-ssm-dtype", "bfloat16")),
        ("tiny-dense", ("--dtype", "float32", "--speculative-draft-window-size", "64", "--page-size", "16")),
        # A window that no sequence fills.
        ("tiny-dense", ("--dtype", "float32", "--speculative-draft-window-size", "4096", "--context-length", "256")),
        ("tiny-hybrid", ("--dtype", "float32", *DECODES)),
        ("tiny-dense", ("--dtype", "float32", "--speculative-draft-window-size", "64", *DECODES)),
    ],
)
def test_the_memory_table_is_what_the_server_allocates(pair: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    models = (target_path(pair), drafter_path(pair))
    draft = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(models[1]))
    with running(tmp_path, "--model-path", str(models[0]), *draft, *SIZES, *flags) as server:
        allocation = allocated(server)
    assert all(allocation[pool] for pool in ("target_kv", "draft_kv", "target_weights", "drafter_weights"))
    assert (allocation["states"] > 0) == (pair != "tiny-dense")
    assert_as_estimated(estimated(*models, *SIZES, *flags), allocation)


@pytest.mark.slow
def test_a_rank_of_two_allocates_the_drafter_that_the_table_counts(tmp_path: Path) -> None:
    models, flags = (target_path("tiny-dense"), drafter_path("tiny-dense")), ("--dtype", "float32", "--tp-size", "2")
    draft = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(models[1]))
    with running(tmp_path, "--model-path", str(models[0]), *draft, *SIZES, *flags) as server:
        allocation = allocated(server)
    assert estimated(*models, *SIZES, *flags)["drafter_weights"] == allocation["drafter_weights"]
