"""Exact mode: bfloat16 text and log-probabilities are plain decoding's, bit by bit, on the CPU platform.

A prefix from the cache changes no bit: SGLang replaces K/V of a request by the cache's while it decodes, one step later
than plain decoding's first token. Chunks shared by requests depend on arrival, so requests whose prompts are cut into
chunks run alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.plan.settings import REPLAY_SWITCH
from sglang_dflash_lab.pairs import target_path
from tests.serving.matrix import CHUNKED, EXACT, FINISHED, IN_EXACT_MODE, MATRIX, PAGED, STRATEGY, SYNC, Cell
from tests.support.checkpoints import widen_mlp
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import RANDOM_WIDTHS, Server, dflash_server, plain_server, worker_info
from tests.support.updates import Tensors, tensors_of, update

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WINDOW = ("--speculative-draft-window-size", "24")
TOP = {"return_logprob": True, "top_logprobs_num": 4}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
NEW_TOKENS = 64
COMPARABLE = 0.6  # share of the generations; without recurrent states, whoever arrives first caches a common beginning
# Flags of both servers, of the drafting one alone, and its environment.
Arm = tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]
EVERYTHING: Arm = ((), (*RANDOM_WIDTHS, "--speculative-draft-window-size", "48"), {})
ARMS: list[tuple[str, Arm]] = [
    ("tiny-hybrid", EVERYTHING),
    ("tiny-hybrid", ((), RANDOM_WIDTHS, {REPLAY_SWITCH: "0"})),
    ("tiny-hybrid", ((*PAGED, STRATEGY, "extra_buffer_lazy"), (), {REPLAY_SWITCH: "1"})),
    ("tiny-hybrid", ((*SYNC, STRATEGY, "no_buffer"), WINDOW, {"SGLANG_DFLASH_COPIES": "1"})),
    ("tiny-dense", EVERYTHING),
    ("tiny-moe", EVERYTHING),
]


def rounds(server: Server, pair: str, prompts: int) -> Iterator[Answer]:
    """Greedy text together, alone with prefix hits, and seeded text."""
    inputs = [*corpus(pair, prompts), *random_prompts(pair, prompts)]
    flush(server)
    yield from generate_all(server, inputs, 8, NEW_TOKENS, **TOP)
    yield from generate_all(server, inputs[:4], 1, NEW_TOKENS, **TOP)
    flush(server)
    for number, prompt in enumerate(inputs[prompts // 2 : -prompts // 2]):
        yield from generate_all(server, [prompt], 1, 32, **TOP, sampling_params={**SEEDED, "sampling_seed": number})


def numbers(answer: Answer) -> list[Any]:
    meta = answer.meta
    return [[[value, token] for value, token, *_ in top] for top in meta["output_top_logprobs"]]


def assert_exact(found: Sequence[Answer], plain: Sequence[Answer]) -> int:
    """Compare tokens and log-probabilities; return the number of generations."""
    assert [ours.tokens for ours in found] == [answer.tokens for answer in plain]
    assert [numbers(ours) for ours in found] == [numbers(answer) for answer in plain]
    return len(found)


def compare(pair: str, arm: Arm, folder: Path, prompts: int = 16) -> None:
    both, drafting, environment = arm
    with plain_server(pair, folder, *both, base=EXACT) as server:
        plain = list(rounds(server, pair, prompts))
    assert_exact(plain[2 * prompts : 2 * prompts + 4], plain[:4])  # from the cache
    block = 32 if RANDOM_WIDTHS[0] in drafting else 16  # with copies, wider than the drafter's
    with dflash_server(pair, folder, *both, *drafting, base=EXACT, block=block, **environment) as server:
        info = worker_info(server)
        assert info["exact"] is True and "bit-identical" in server.log
        found = list(rounds(server, pair, prompts))
        assert_nothing_leaked(server)
        drafted = worker_info(server)["mean_accept_length"]
    assert drafted > 1.2, "nothing was drafted"
    print(f"{assert_exact(found, plain)} generations equal, accept length {drafted:.2f}")


def noised(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor + 0.05 * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in tensors.items()
        if tensor.dim() == 2
    }


def rollouts(server: Server, pair: str) -> list[Answer]:
    """Seeded text with log-probabilities and hidden states, of a target and then of another one."""
    body, found = {**TOP, "return_hidden_states": True}, list[Answer]()
    target = tensors_of(target_path(pair))
    for weights in (target, noised(target)):
        assert update(server, weights, "all").status_code == 200
        for number, prompt in enumerate([*corpus(pair, 4), *random_prompts(pair, 4)]):
            flush(server)
            sampling = {**SEEDED, "sampling_seed": number}
            found.append(generate(server, prompt, 32, **body, sampling_params=sampling))
    return found


def test_rollouts_before_and_after_an_update_are_on_policy(tmp_path: Path) -> None:
    """A trainer's ratios of log-probabilities do not show that tokens were drafted."""
    pair, flags = "tiny-hybrid", ("--enable-return-hidden-states",)
    with plain_server(pair, tmp_path, *flags, base=EXACT) as server:
        plain = rollouts(server, pair)
    with dflash_server(pair, tmp_path, *flags, base=EXACT) as server:
        found = rollouts(server, pair)
    assert assert_exact(found, plain) == len(plain)
    assert [ours.meta["hidden_states"] for ours in found] == [answer.meta["hidden_states"] for answer in plain]
    half = len(plain) // 2
    assert all(numbers(old) != numbers(new) for old, new in zip(plain[:half], plain[half:], strict=True))


@pytest.mark.timeout(1200)
def test_sums_of_more_than_1024_products(tmp_path: Path) -> None:
    """Processors choose a product's order of sums by its inputs and rows; the pairs' own products are small."""
    target = widen_mlp(target_path("tiny-dense"), tmp_path / "target")
    compare("tiny-dense", (("--model-path", str(target)), RANDOM_WIDTHS, {}), tmp_path, prompts=8)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("pair", "arm"), ARMS)
def test_under_every_feature(pair: str, arm: Arm, tmp_path: Path) -> None:
    compare(pair, arm, tmp_path)


def greedy(cell: Cell, server: Server) -> Iterator[tuple[str, list[Any]]]:
    """Tokens and log-probabilities together, alone, and from the prefix cache, by prompt and cached tokens.

    Without those of retracted requests, which are prefilled again at a token that depends on the others.
    """
    inputs = [*corpus(cell.pair, 24), *random_prompts(cell.pair, 24)]
    for concurrency in (1,) if CHUNKED[0] in cell.arguments else (8, 1):
        flush(server)
        asked = [*range(0, len(inputs), 2 if concurrency == 1 else 1), 0, 2]
        answers = generate_all(server, [inputs[number] for number in asked], concurrency, NEW_TOKENS, **TOP)
        for number, answer in zip(asked, answers, strict=True):
            if not answer.meta["num_retractions"]:
                yield f"{number}, {answer.meta['cached_tokens']} cached", [answer.tokens, numbers(answer)]


def plain_text(cell: Cell, folder: Path) -> dict[str, list[Any]]:
    # Of all flags, these move plain decoding's rounding: what a prefill attends to as a prefix.
    arguments = tuple(word for flag in (CHUNKED, PAGED) if flag[0] in cell.arguments for word in flag)
    name = " ".join((cell.pair, *arguments))
    if name not in FINISHED.results():
        with plain_server(cell.pair, folder, *arguments, base=EXACT) as server:
            found = list(greedy(cell, server))
        assert all(dict(found)[key] == answer for key, answer in found), "plain decoding depends on its batch"
        FINISHED.add(name, dict(found))
    stored: dict[str, list[Any]] = FINISHED.results()[name]
    return stored


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", [cell for cell in MATRIX if IN_EXACT_MODE], ids=str)
def test_in_every_cell_of_the_matrix(cell: Cell, tmp_path: Path) -> None:
    if reasons := cell.inexact():
        pytest.skip("; ".join(reasons))
    if str(cell) in FINISHED.results():
        pytest.skip("passed before with this very package (tests/serving/matrix.py)")
    plain = plain_text(cell, tmp_path)
    drafts: dict[str, Any] = {"drafter": cell.drafter, "block": cell.block, **dict(cell.environment)}
    with dflash_server(cell.pair, tmp_path, *cell.arguments, base=EXACT, **drafts) as server:
        assert worker_info(server)["exact"] is True
        found = [(key, answer, plain.get(key)) for key, answer in greedy(cell, server)]
        assert_nothing_leaked(server)
    comparable = [(key, answer, expected) for key, answer, expected in found if expected is not None]
    assert not [key for key, answer, expected in comparable if answer != expected]
    assert len(comparable) > COMPARABLE * len(found)
    FINISHED.add(str(cell), len(comparable))
