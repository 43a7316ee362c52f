"""Prompts with images: the target's answers, and drafts that know what is in them.

The target's rotation counts an image's rows and columns (M-RoPE), so its positions fall behind the number of tokens;
the drafter counts tokens. Drafts show whether it was told the right thing: a bad one changes no token.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from sglang_dflash_lab.train.drafter import Drafter
from tests.serving.images import (
    BLOCK,
    HYBRIDS,
    IMAGE_TOKEN,
    Picture,
    Prompt,
    Reading,
    chat,
    drafter_for_images,
    generate,
    inputs_of,
    processor,
    write_target,
)
from tests.support.generation import assert_nothing_leaked, flush
from tests.support.pair_servers import RANDOM_WIDTHS, RETRACTED, TRACKED, recorded_blocks, with_plugin, worker_info
from tests.support.servers import Server, running

pytestmark = pytest.mark.engine

NEW_TOKENS = 40
CHUNK, WINDOW = 64, 32
CAT, DOG = Picture(4, 3, seed=1), Picture(4, 3, seed=2)
TALL, LARGE = Picture(2, 7, seed=3), Picture(12, 11, seed=4)
PROMPTS: dict[str, Prompt] = {
    "text": ["Count from one to ten, then back, and say why the order matters to you."],
    "image": [CAT, "What is it?"],
    "other image": [DOG, "What is it?"],
    "between": ["Look at this picture: ", TALL, " Is it taller than it is wide?"],
    "two": ["First ", CAT, " and second ", TALL, ": which of them is the larger one?"],
    # More image tokens than a chunk has.
    "large": ["A large one ", LARGE, " with many tokens."],
    "long text": [DOG, "All that follows is text. " * 12],
}
BASE = ("--dtype", "float32", "--max-running-requests", "8", "--chunked-prefill-size", str(CHUNK))


@dataclass(frozen=True)
class Pair:
    """A vision-language target and its drafter, on disk and in transformers."""

    name: str
    folder: Path
    model: transformers.PreTrainedModel
    drafter: Drafter
    processor: transformers.ProcessorMixin

    @classmethod
    def write(cls, name: str, folder: Path) -> Pair:
        return cls(
            name, folder, write_target(name, folder / "target"), drafter_for_images(folder / "drafter"), processor()
        )

    @contextlib.contextmanager
    def plain(self, folder: Path, *flags: str, **environment: str) -> Iterator[Server]:
        """The target alone."""
        tracked = TRACKED if self.name in HYBRIDS else ()
        command = ("--model-path", str(self.folder / "target"), *BASE, *tracked, *flags)
        with running(folder, *command, **environment) as server:
            yield server

    @contextlib.contextmanager
    def ours(self, folder: Path, *flags: str, **environment: str) -> Iterator[Server]:
        """Under DFLASH; ``drafts.jsonl`` has the drafts before some of them are corrected by ``answers.json``."""
        speculative = (
            *("--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", str(BLOCK)),
            *("--speculative-draft-model-path", str(self.folder / "drafter")),
        )
        copies = ("history",) if set(RANDOM_WIDTHS) <= set(flags) else ()
        plugin = with_plugin(folder, "drafts", "oracle", *copies)
        with self.plain(folder, *speculative, *flags, **plugin, **environment) as server:
            assert worker_info(server)["block_size"] == BLOCK
            yield server
            assert_nothing_leaked(server)


def ask(server: Server, names: list[str], attempt: str) -> dict[str, dict[str, Any]]:
    """The prompts of these names in one request."""
    found = generate(server, [PROMPTS[n] for n in names], NEW_TOKENS, [f"{n}/{attempt}" for n in names])
    return dict(zip(names, found, strict=True))


def tokens(answers: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    return {name: answer["output_ids"] for name, answer in answers.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.write("qwen3_5", tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def served(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("ours")
    with pair.ours(folder) as server:
        yield server, folder


def test_answers_are_the_targets_together_and_from_the_prefix_cache(pair: Pair, served: tuple[Server, Path]) -> None:
    server, folder = served
    answers = tokens(ask(server, list(PROMPTS), "uncorrected"))
    for name, answer in answers.items():
        assert Reading(pair.model, pair.processor, pair.drafter, PROMPTS[name], answer).greedy == answer, name
    assert answers["image"] != answers["other image"], "the image does not matter"
    (folder / "answers.json").write_text(json.dumps(answers))
    cached = assert_answers(server, answers)
    assert cached["long text"] - first_image_token(pair, "long text") > DOG.tokens, "no hit ends after an image"
    flush(server)  # alone: among others, the ends of its chunks depend on when they arrive
    alone, hit = (ask(server, ["large"], attempt)["large"] for attempt in ("alone", "hit"))
    assert alone["output_ids"] == hit["output_ids"] == answers["large"]
    assert 0 < hit["meta_info"]["cached_tokens"] - first_image_token(pair, "large") < LARGE.tokens, "none inside one"


def first_image_token(pair: Pair, name: str) -> int:
    return int((inputs_of(PROMPTS[name], pair.processor)["input_ids"][0] == IMAGE_TOKEN).nonzero()[0])


def assert_answers(server: Server, answers: dict[str, list[int]]) -> dict[str, int]:
    """All at once into an empty cache, then each alone; how much of each the cache had."""
    flush(server)
    together = ask(server, list(PROMPTS), "together")
    assert tokens(together) == answers
    again = {name: ask(server, [name], "again")[name] for name in PROMPTS}
    assert tokens(again) == answers
    blocks = [answer["meta_info"]["spec_verify_ct"] for answer in together.values()]
    assert 1.5 * sum(blocks) < NEW_TOKENS * len(blocks), "hardly any draft was accepted"
    return {name: answer["meta_info"]["cached_tokens"] for name, answer in again.items()}


def test_drafts_are_the_references(pair: Pair, served: tuple[Server, Path]) -> None:
    assert_drafts(pair, *served)


def assert_drafts(pair: Pair, server: Server, folder: Path, window: int | None = None) -> None:
    """Every block's drafts, without and with a prefix hit; and that a drafter told otherwise would draft otherwise."""
    names = [name for name in PROMPTS if name != "text"]
    flush(server)
    answers = {(name, attempt): a for attempt in ("fresh", "cached") for name, a in ask(server, names, attempt).items()}
    told_apart = {"rope": False, "blind": False}
    for (name, attempt), answer in answers.items():
        reading = Reading(pair.model, pair.processor, pair.drafter, PROMPTS[name], answer["output_ids"])
        assert reading.greedy == answer["output_ids"], name
        # A step that was launched before the request's end was known has a block after it.
        found = recorded_blocks(folder, f"{name}/{attempt}")
        blocks = {at: block for at, block in found if at < len(reading.tokens)}
        assert len(blocks) > 1
        for at, block in blocks.items():
            drafts = reading.drafts(at, len(block), window)
            assert block[0] == reading.tokens[at]
            pairs = zip(block[1:], drafts, strict=True)
            assert all(draft in likeliest for draft, likeliest in pairs), (name, attempt, at, block, drafts)
            for wrong in told_apart:
                told_apart[wrong] |= drafts != reading.drafts(at, len(block), window, **{wrong: True})
    assert all(told_apart.values()), f"a drafter told otherwise would draft the same: {told_apart}"


OTHERWISE: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "Qwen3-VL, deepstack": ("qwen3_vl", (), {}),
    "Qwen3-VL, pages of 16": ("qwen3_vl", ("--page-size", "16"), {}),
    "Qwen3.5 of experts": ("qwen3_5_moe", (), {}),
    "draft window": ("qwen3_5", ("--speculative-draft-window-size", str(WINDOW)), {}),
    "widths at random, copies": ("qwen3_5", RANDOM_WIDTHS, {}),
    "mixed batches": ("qwen3_5", ("--enable-mixed-chunk", "--max-running-requests", "3"), {}),
    "no overlap": ("qwen3_5", ("--disable-overlap-schedule",), {}),
    "retraction": ("qwen3_5", (), RETRACTED),
    "two ranks": ("qwen3_5", ("--tp-size", "2"), {}),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", OTHERWISE)
def test_served_otherwise(case: str, tmp_path: Path) -> None:
    name, flags, environment = OTHERWISE[case]
    pair = Pair.write(name, tmp_path)
    with pair.plain(tmp_path) as server:
        answers, said = tokens(ask(server, list(PROMPTS), "plain")), chat(server, PROMPTS["two"], NEW_TOKENS)
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    with pair.ours(tmp_path, *flags, **environment) as server:
        assert_answers(server, answers)
        assert chat(server, PROMPTS["two"], NEW_TOKENS) == said
        assert_drafts(pair, server, tmp_path, WINDOW if case == "draft window" else None)
