"""On a CUDA device, in bfloat16: plain decoding's tokens up to a near-tie, eager and as graphs, and a step's stages."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.generation import (
    Answer,
    assert_diverging_only_at_near_ties,
    assert_nothing_leaked,
    flush,
    generate_all,
)
from tests.support.pair_servers import BFLOAT16, RANDOM_WIDTHS, dflash_server, plain_server, worker_info
from tests.support.prompts import corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that this torch can use"),
]

PROMPTS, NEW_TOKENS = 32, 128
SYNC, EAGER = "--disable-overlap-schedule", "--disable-cuda-graph"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@cache
def plain_answers(pair: str, folder: Path) -> list[Answer]:
    """Plain decoding's texts, each with the target's two largest log-probabilities at every token."""
    with plain_server(pair, folder, "--attention-backend", "triton", base=BFLOAT16) as server:
        return generate_all(server, corpus(pair, PROMPTS), 8, NEW_TOKENS, return_logprob=True, top_logprobs_num=2)


@pytest.mark.parametrize("pair", ["tiny-dense", "tiny-hybrid"])
@pytest.mark.parametrize("backend", ["triton", "flashinfer", "fa3"])
@pytest.mark.parametrize(
    "options",
    [(), (SYNC,), (EAGER,), (SYNC, EAGER), RANDOM_WIDTHS, (*RANDOM_WIDTHS, EAGER)],
    ids=lambda options: " ".join(option for option in options if option.startswith("--")),
)
def test_tokens_equal_plain_decoding(
    pair: str, backend: str, options: tuple[str, ...], tmp_path: Path, folder: Path
) -> None:
    compare_with_plain(pair, backend, options, tmp_path, folder)


CACHED = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "fa3"])
@pytest.mark.parametrize(
    "options",
    [
        (),
        RANDOM_WIDTHS,
        CACHED,
        ("--cuda-graph-bs-decode", "3", "12"),
        ("--speculative-draft-window-size", "64"),
        (*RANDOM_WIDTHS, *CACHED, "--speculative-draft-window-size", "24"),
    ],
    ids=["graphs", "widths", "prefix hits", "padding rows", "draft window", "widths, prefix hits, window"],
)
def test_tokens_equal_plain_decoding_with_states_replayed(
    backend: str, options: tuple[str, ...], tmp_path: Path, folder: Path
) -> None:
    """What a 27B takes by default: a tiny pair has room for every state, so it must be asked for."""
    compare_with_plain("tiny-hybrid", backend, options, tmp_path, folder, SGLANG_DFLASH_STATE_REPLAY="1")


def compare_with_plain(
    pair: str, backend: str, options: tuple[str, ...], tmp_path: Path, folder: Path, **variables: str
) -> None:
    if backend == "fa3" and torch.cuda.get_device_capability()[0] not in (8, 9):
        pytest.skip("fa3 needs compute capability 8 or 9")
    plain = plain_answers(pair, folder)
    arguments = ("--attention-backend", backend, "--speculative-draft-attention-backend", backend, *options)
    environment = {"SGLANG_DFLASH_STAGE_TIMES": "1", "SGLANG_DFLASH_FORBID_SYNC": "2" if backend == "triton" else "0"}
    varied = RANDOM_WIDTHS[0] in options
    block = 32 if varied and not set(CACHED) <= set(options) else 16
    with dflash_server(pair, tmp_path, *arguments, base=BFLOAT16, block=block, **environment, **variables) as server:
        for concurrency in (8, 1):
            if not set(CACHED) <= set(options):
                flush(server)
            answers = generate_all(server, corpus(pair, PROMPTS), concurrency, NEW_TOKENS)
            assert_diverging_only_at_near_ties(answers, plain)
        info = worker_info(server)
        assert_nothing_leaked(server)
    steps = sum(info["steps_by_width"].values())
    assert len(info["steps_by_width"]) == (block.bit_length() if varied else 1)
    assert info["states"] == ("replayed" if variables else "kept")
    assert not set(CACHED) <= set(options) or any(answer.meta["cached_tokens"] for answer in answers)
    stages = {"draft", "verify", "accept", "commit", "inject", *(["copies"] if varied else [])}
    assert set(info["stage_seconds"]) == stages
    times = {stage: f"{1000 * seconds / steps:.3f} ms" for stage, seconds in info["stage_seconds"].items()}
    print(f"\n{pair} {backend} {options}: accept length {info['mean_accept_length']:.2f}, per step {times}")
