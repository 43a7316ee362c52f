"""Step by step: drafts, steps and texts of sampled requests against the plain-PyTorch reference decoder.

The pair's text forks, so a draft is often unsure and drawn with the target's noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.reference_decoder import ReferenceDecoder
from sglang_dflash_lab.train.sampling import Sampling
from tests.support.generation import Params, generate_all
from tests.support.prompts import corpus
from tests.support.servers import Server, dflash_server, recorded_blocks, with_plugin

pytestmark = pytest.mark.engine

PAIR, NEW_TOKENS = "tiny-forks", 64
SAMPLED = [Sampling(seed, t, top_p) for seed, (t, top_p) in enumerate([(0.7, 1), (0.7, 0.95), (1, 1), (1, 0.95)])]
REQUESTS = [*SAMPLED, None, *SAMPLED]  # greedy among sampled, more than run at a time


@pytest.fixture(params=["good", "dflash2"])
def drafter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(drafter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sampled")
    plugin = with_plugin(folder, "drafts")
    with dflash_server(PAIR, folder, "--max-running-requests", "4", drafter=drafter, **plugin) as server:
        yield server


def test_sampled_drafts_and_texts_equal_the_reference_step_by_step(server: Server, drafter: str) -> None:
    reference = ReferenceDecoder.load(target_path(PAIR), drafter_path(PAIR, drafter))
    prompts = corpus(PAIR, len(REQUESTS), seed=1, shape="single")

    def parameters(i: int) -> Params:
        sampling = REQUESTS[i]
        names = () if sampling is None else ("temperature", "top_p", "sampling_seed")
        return {"sampling_params": {"max_new_tokens": NEW_TOKENS, **{name: getattr(sampling, name) for name in names}}}

    answers = generate_all(server, prompts, 5, each=parameters)
    steps = best = 0
    for prompt, sampling, answer in zip(prompts, REQUESTS, answers, strict=True):
        expected = reference.decode(prompt, NEW_TOKENS, sampling=sampling)
        assert answer.tokens == expected.tokens == reference.plain(prompt, NEW_TOKENS, sampling)
        verified = recorded_blocks(server.folder, answer.meta["id"])[: len(expected.steps)]
        assert [tuple(block[1:]) for _, block in verified] == [step.drafted for step in expected.steps]
        assert answer.meta["spec_verify_ct"] == len(expected.steps)
        if sampling is not None:
            steps += len(expected.steps)
            best += len(reference.decode(prompt, NEW_TOKENS, sampling=replace(sampling, unsure=0.0)).steps)
    assert steps < 0.95 * best, f"{steps} steps, {best} with the best drafts"
