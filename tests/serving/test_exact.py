"""Exact mode: bfloat16 text and log-probabilities are plain decoding's, bit by bit, on the CPU platform.

A prefix from the cache changes no bit: SGLang replaces K/V of a request by the cache's while it decodes, one step later
than plain decoding's first token. Chunks shared by requests depend on arrival, so requests whose prompts are cut into
chunks run alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash_lab.pairs import target_path
from tests.serving.matrix import CHUNKED, EXACT, IN_EXACT_MODE, MATRIX, PAGED, STRATEGY, SYNC, WINDOW, Cell, finished
from tests.support.checkpoints import widen_mlp
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import ONE_WIDTH, RANDOM_WIDTHS, Server, dflash_server, plain_server, worker_info

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOP = {"return_logprob": True, "top_logprobs_num": 4}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
NEW_TOKENS = 64
COMPARABLE = 0.6  # share of the generations; without recurrent states, whoever arrives first caches a common beginning
FINISHED = finished(exact=True)
EVERYTHING = (*RANDOM_WIDTHS, "--speculative-draft-window-size", "48")
CELLS = (
    Cell("tiny-hybrid", block=32, arguments=EVERYTHING),
    Cell("tiny-hybrid", arguments=(*PAGED, STRATEGY, "extra_buffer_lazy")),
    Cell("tiny-hybrid", arguments=(*SYNC, STRATEGY, "no_buffer", *WINDOW, *ONE_WIDTH)),
    Cell("tiny-dense", block=32, arguments=EVERYTHING),
    Cell("tiny-moe", block=32, arguments=EVERYTHING),
)


def numbers(answer: Answer) -> list[Any]:
    return [[[value, token] for value, token, *_ in top] for top in answer.meta["output_top_logprobs"]]


def texts(cell: Cell, server: Server) -> Iterator[tuple[str, list[Any]]]:
    """Tokens and log-probabilities together, alone, and from the prefix cache, by prompt and cached tokens.

    Without those of retracted requests, which are prefilled again at a token that depends on the others. Seeded text
    too, but for the cells of the matrix.
    """
    inputs = [*corpus(cell.pair, 24), *random_prompts(cell.pair, 24)]
    for concurrency in (1,) if CHUNKED[0] in cell.arguments else (8, 1):
        flush(server)
        asked = [*range(0, len(inputs), 2 if concurrency == 1 else 1), 0, 2]
        answers = generate_all(server, [inputs[number] for number in asked], concurrency, NEW_TOKENS, **TOP)
        for number, answer in zip(asked, answers, strict=True):
            if not answer.meta["num_retractions"]:
                yield f"{number}, {answer.meta['cached_tokens']} cached", [answer.tokens, numbers(answer)]
    for number, prompt in enumerate([] if cell in MATRIX else inputs[16:32]):
        flush(server)
        answer = generate(server, prompt, 32, **TOP, sampling_params={**SEEDED, "sampling_seed": number})
        yield f"seed {number}", [answer.tokens, numbers(answer)]


def plain_text(cell: Cell, folder: Path, *model: str) -> dict[str, list[Any]]:
    # Of all flags, these move plain decoding's rounding: what a prefill attends to as a prefix.
    arguments = [word for flag in (CHUNKED, PAGED) if flag[0] in cell.arguments for word in flag]
    name = " ".join((cell.pair, *arguments, *(Path(word).name for word in model), "" if cell in MATRIX else "seeds"))
    if name not in FINISHED.results():
        with plain_server(cell.pair, folder, *arguments, *model, base=EXACT) as server:
            found = list(texts(cell, server))
        assert all(dict(found)[key] == answer for key, answer in found), "plain decoding depends on its batch"
        FINISHED.add(name, dict(found))
    stored: dict[str, list[Any]] = FINISHED.results()[name]
    return stored


def compare(cell: Cell, folder: Path, *model: str) -> int:
    """Return the number of generations that could be compared."""
    plain, drafts = plain_text(cell, folder, *model), {"drafter": cell.drafter, "block": cell.block}
    environment: dict[str, Any] = dict(cell.environment)
    with dflash_server(cell.pair, folder, *cell.arguments, *model, base=EXACT, **drafts, **environment) as server:
        assert worker_info(server)["exact"] is True and "bit-identical" in server.log
        found = [(key, answer, plain.get(key)) for key, answer in texts(cell, server)]
        assert_nothing_leaked(server)
        assert cell in MATRIX or worker_info(server)["mean_accept_length"] > 1.2, "nothing was drafted"
    comparable = [(key, answer, expected) for key, answer, expected in found if expected is not None]
    assert not [key for key, answer, expected in comparable if answer != expected]
    assert len(comparable) > COMPARABLE * len(found)
    return len(comparable)


@pytest.mark.timeout(1200)
def test_sums_of_more_than_1024_products(tmp_path: Path) -> None:
    """Processors choose a product's order of sums by its inputs and rows; the pairs' own products are small."""
    target = widen_mlp(target_path("tiny-dense"), tmp_path / "wide")
    compare(Cell("tiny-dense", block=32, arguments=RANDOM_WIDTHS), tmp_path, "--model-path", str(target))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", (*CELLS, *(MATRIX if IN_EXACT_MODE else ())), ids=str)
def test_in_every_cell_of_the_matrix(cell: Cell, tmp_path: Path) -> None:
    if reasons := cell.inexact():
        pytest.skip("; ".join(reasons))
    if str(cell) in FINISHED.results():
        pytest.skip("passed before with this very package (tests/serving/matrix.py)")
    FINISHED.add(str(cell), compare(cell, tmp_path))
