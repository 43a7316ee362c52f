"""Step by step: drafts, steps and texts of sampled requests against the plain-PyTorch reference decoder.

The pair's text forks, so a draft is often unsure and drawn with the target's noise.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dflash.launch.settings import DETERMINISTIC_FLAG
from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.reference_decoder import Decoded, ReferenceDecoder
from sglang_dflash_lab.train.sampling import Sampling
from tests.support.generation import Answer, Params, generate, generate_all
from tests.support.prompts import corpus
from tests.support.servers import BASE, BFLOAT16, Server, dflash_server, plain_server, recorded_blocks, with_plugin

pytestmark = pytest.mark.engine

PAIR, NEW_TOKENS = "tiny-forks", 64
SAMPLED = [Sampling(seed, t, top_p) for seed, (t, top_p) in enumerate([(0.7, 1), (0.7, 0.95), (1, 1), (1, 0.95)])]
REQUESTS = [*SAMPLED, None, *SAMPLED]  # greedy among sampled, more than run at a time


@pytest.mark.parametrize("drafter", ["dflash2", pytest.param("good", marks=pytest.mark.slow)])
def test_sampled_drafts_and_texts_equal_the_reference_step_by_step(drafter: str, tmp_path: Path) -> None:
    reference = ReferenceDecoder.load(target_path(PAIR), drafter_path(PAIR, drafter))
    prompts, plugin = corpus(PAIR, len(REQUESTS), seed=1, shape="single"), with_plugin(tmp_path, "drafts")
    with dflash_server(PAIR, tmp_path, "--max-running-requests", "4", drafter=drafter, **plugin) as server:
        answers = generate_all(server, prompts, 5, each=lambda i: parameters(REQUESTS[i]))
    steps = best = 0
    for prompt, sampling, answer in zip(prompts, REQUESTS, answers, strict=True):
        expected = assert_as_the_reference(reference, prompt, sampling, answer, tmp_path)
        assert answer.tokens == reference.plain(prompt, NEW_TOKENS, sampling)
        if sampling is not None:
            steps += len(expected.steps)
            best += len(reference.decode(prompt, NEW_TOKENS, sampling=replace(sampling, unsure=0.0)).steps)
    assert steps < 0.95 * best, f"{steps} steps, {best} with the best drafts"


@pytest.mark.slow
@pytest.mark.parametrize("base", [BASE, BFLOAT16], ids=["float32", "exact mode"])
def test_in_deterministic_mode_the_noise_is_sglangs(base: tuple[str, ...], tmp_path: Path) -> None:
    """Under top_p it belongs to ranks, so drafts are the best tokens."""
    reference = ReferenceDecoder.load(target_path(PAIR), drafter_path(PAIR, "dflash2"))
    prompts = corpus(PAIR, len(SAMPLED), seed=2, shape="single")
    asked = [each if each.top_p == 1 else replace(each, unsure=0.0, by_rank=True) for each in SAMPLED]

    def texts(server: Server) -> list[Answer]:
        return [generate(server, prompt, **parameters(each)) for prompt, each in zip(prompts, asked, strict=True)]

    with plain_server(PAIR, tmp_path, DETERMINISTIC_FLAG, base=base) as server:
        plain = texts(server)
    plugin = with_plugin(tmp_path, "drafts")
    with dflash_server(PAIR, tmp_path, DETERMINISTIC_FLAG, base=base, drafter="dflash2", **plugin) as server:
        assert ("bit-identical" in server.log) == (base == BFLOAT16)
        answers = texts(server)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    for prompt, each, answer in zip(prompts, asked, answers if base == BASE else [], strict=base == BASE):
        assert_as_the_reference(reference, prompt, each, answer, tmp_path)  # which is not exact in bfloat16


def assert_as_the_reference(
    reference: ReferenceDecoder, prompt: list[int], sampling: Sampling | None, answer: Answer, folder: Path
) -> Decoded:
    expected = reference.decode(prompt, NEW_TOKENS, sampling=sampling)
    assert answer.tokens == expected.tokens and answer.meta["spec_verify_ct"] == len(expected.steps)
    verified = recorded_blocks(folder, answer.meta["id"])[: len(expected.steps)]
    assert [tuple(block[1:]) for _, block in verified] == [step.drafted for step in expected.steps]
    return expected


def parameters(sampling: Sampling | None) -> Params:
    names = () if sampling is None else ("temperature", "top_p", "sampling_seed")
    return {"sampling_params": {"max_new_tokens": NEW_TOKENS, **{name: getattr(sampling, name) for name in names}}}
