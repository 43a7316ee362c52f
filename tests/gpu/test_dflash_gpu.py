"""On a CUDA device: the same tokens as plain decoding, eager and as graphs, and where a step's time goes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tests.engine.dflash import (
    assert_nothing_leaked,
    corpus,
    dflash_server,
    flush,
    generate_all,
    plain_server,
    worker_info,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that this torch can use"),
]

PAIR = "tiny-hybrid"
NEW_TOKENS = 128
SYNC, EAGER = "--disable-overlap-schedule", "--disable-cuda-graph"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with plain_server(PAIR, tmp_path_factory.mktemp("plain"), "--attention-backend", "triton") as server:
        return [answer.tokens for answer in generate_all(server, corpus(PAIR, 32), 8, NEW_TOKENS)]


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("options", [(), (SYNC,), (EAGER,), (SYNC, EAGER)], ids=" ".join)
def test_tokens_equal_plain_decoding(
    backend: str, options: tuple[str, ...], tmp_path: Path, plain: list[list[int]]
) -> None:
    arguments = ("--attention-backend", backend, "--speculative-draft-attention-backend", backend, *options)
    environment = {"SGLANG_DFLASH_STAGE_TIMES": "1", "SGLANG_DFLASH_FORBID_SYNC": "1" if backend == "triton" else "0"}
    with dflash_server(PAIR, tmp_path, *arguments, **environment) as server:
        for concurrency in (8, 1):
            flush(server)
            answers = generate_all(server, corpus(PAIR, 32), concurrency, NEW_TOKENS)
            assert [answer.tokens for answer in answers] == plain
        info = worker_info(server)
        assert_nothing_leaked(server)
    steps = sum(info["steps_by_width"].values())
    assert set(info["stage_seconds"]) == {"draft", "verify", "accept", "commit", "inject"}
    times = {stage: f"{1000 * seconds / steps:.3f} ms" for stage, seconds in info["stage_seconds"].items()}
    print(f"\n{backend} {' '.join(options)}: accept length {info['mean_accept_length']:.2f}, per step {times}")
