"""Sampled text of a trained pair has the target's law, counted where the target is unsure.

A trained target is sure of nearly every token, and there any acceptance rule gives the same. So the texts start after
random tokens, which leaves the target many ways to go on, and the law is counted at those tokens before which no choice
had a probability of ``UNSURE`` or more: a quarter of them, or a third. A draft is in doubt at few of these, so a wrong
rule hardly moves that count; it does move the number of drafts that are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from sglang_dflash_lab.pairs import target_path
from tests.support.generation import Params
from tests.support.pair_servers import dflash_server, with_plugin
from tests.support.prompts import random_prompts
from tests.support.sampled_law import Sample, assert_seeds_decided, p_of_kept_drafts, p_of_one_and_two, sample
from tests.support.servers import Server

PAIR = "tiny-hybrid"
PROMPTS, TEXTS, LENGTH = 80, 16, 64
BLOCK, UNSURE = 4, 0.9
BATCH = ("--max-running-requests", "32")

SETTINGS: dict[str, Params] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 1.4": {"temperature": 1.4},
    "top-p": {"temperature": 1.4, "top_p": 0.95},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.1, "presence_penalty": 0.4, "repetition_penalty": 1.2},
}

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def target() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(target_path(PAIR), dtype="float32").eval()


@contextlib.contextmanager
def recorded_server(folder: Path, *modes: str) -> Iterator[Server]:
    """A server that writes its drafts to ``folder``; further modes of the plugin."""
    with dflash_server(PAIR, folder, *BATCH, block=BLOCK, **with_plugin(folder, "drafts", *modes)) as server:
        yield server


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dflash")


@pytest.fixture(scope="module")
def served(probe: Path) -> Iterator[Server]:
    with recorded_server(probe) as server:
        yield server


def draw(
    server: Server, target: transformers.PreTrainedModel, probe: Path, name: str, *, prompts: int, seeded: bool
) -> Sample:
    generator = torch.Generator().manual_seed(0)
    size = {"texts": TEXTS, "length": LENGTH}
    inputs = random_prompts(PAIR, prompts)
    return sample(server, target, inputs, SETTINGS[name], **size, seeded=seeded, generator=generator, probe=probe)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trained_pair_has_the_targets_law(
    name: str, served: Server, probe: Path, target: transformers.PreTrainedModel
) -> None:
    found = draw(served, target, probe, name, prompts=PROMPTS, seeded=True)
    one, two = p_of_one_and_two(found.points[found.tops < UNSURE])
    kept = p_of_kept_drafts(found)
    assert min(one, two, kept) > 0.01, (one, two, kept)
    assert_seeds_decided(found.delays)


@pytest.mark.parametrize("rule", ["draw_twice", "keep_likely"])
def test_a_wrong_acceptance_rule_is_noticed(rule: str, target: transformers.PreTrainedModel, tmp_path: Path) -> None:
    with recorded_server(tmp_path, rule) as server:
        found = draw(server, target, tmp_path, "temperature 1.4", prompts=PROMPTS // 4, seeded=False)
    assert p_of_kept_drafts(found) < 1e-6
