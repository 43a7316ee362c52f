"""The oracle itself: equal to plain greedy decoding, exact in distribution, and wrong when its replay is broken."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from sglang_dflash_lab.pairs import NAMES, drafter_kinds, drafter_path, target_path
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.train.hf import transformers
from sglang_dflash_lab.train.measure import prompt_ids
from tests.support.reference_decoder import DrafterRun, ReferenceDecoder, TargetRun, verify

SHIPPED = [(name, kind) for name in NAMES for kind in drafter_kinds(name)]
MAX_NEW_TOKENS = 60


@cache
def decoder(name: str, kind: str = "good") -> ReferenceDecoder:
    return ReferenceDecoder.load(target_path(name), drafter_path(name, kind))


@cache
def asked(task: str, n: int = 1, shape: str = "single") -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))
    return [prompt_ids(tokenizer, prompt) for prompt in prompts(task, n=n, shape=shape)]


@pytest.mark.parametrize("name", NAMES)
def test_plain_decoding_is_transformers_own_greedy_decoding(name: str) -> None:
    d, prompt = decoder(name), asked("json")[0]
    out = d.target.generate(torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    assert d.plain(prompt, MAX_NEW_TOKENS) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("name", "kind"), SHIPPED)
def test_every_pair_gives_the_targets_output_at_changing_widths(name: str, kind: str) -> None:
    d = decoder(name, kind)
    for prompt in asked("json")[:1] + asked("math")[:1]:
        plain = d.plain(prompt, MAX_NEW_TOKENS)
        for width in (16, [1, 5, 2, 16, 3], lambda step: 2 + step % 7):
            assert d.decode(prompt, MAX_NEW_TOKENS, width).tokens == plain


@pytest.mark.slow
def test_a_broken_replay_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting keys and values off but leaving the recurrent state as the rejected tokens made it: wrong output."""
    d = decoder("tiny-hybrid", "weak")
    cases = [prompt for task in TASKS for prompt in asked(task, 2)]
    plain = [d.plain(prompt, MAX_NEW_TOKENS) for prompt in cases]
    assert [d.decode(prompt, MAX_NEW_TOKENS).tokens for prompt in cases] == plain
    monkeypatch.setattr(TargetRun, "restore", lambda self, state: None)
    broken = [d.decode(prompt, MAX_NEW_TOKENS).tokens for prompt in cases]
    assert sum(a != b for a, b in zip(broken, plain, strict=True)) >= len(cases) // 2


def test_the_captured_state_is_that_of_the_kept_tokens() -> None:
    d, prompt = decoder("tiny-hybrid", "weak"), asked("chat")[0]
    out = d.decode(prompt, MAX_NEW_TOKENS, capture_state=True)
    kept = 1
    for step in out.steps[:6]:
        run = TargetRun(d.target)
        run.append([*prompt, *out.tokens[: kept - 1 + step.accept_length]])
        kept += step.accept_length
        expected = run.recurrent_state()
        assert step.state.keys() == expected.keys() == {0, 1, 2, 4, 5, 6}
        for layer, states in expected.items():
            for captured, fresh in zip(step.state[layer], states, strict=True):
                torch.testing.assert_close(captured, fresh, atol=1e-4, rtol=1e-4)


def test_a_draft_window_changes_drafts_only_where_it_cuts() -> None:
    d, prompt = decoder("tiny-hybrid"), asked("json", shape="document")[0]
    whole = d.decode(prompt, MAX_NEW_TOKENS)
    covering = d.decode(prompt, MAX_NEW_TOKENS, draft_window=len(prompt) + MAX_NEW_TOKENS + 16)
    cut = d.decode(prompt, MAX_NEW_TOKENS, draft_window=8)
    assert covering == whole
    assert cut.tokens == whole.tokens
    assert [step.drafted for step in cut.steps] != [step.drafted for step in whole.steps]


def hidden_of_block(kind: str, *windows: tuple[int | None, int]) -> list[torch.Tensor]:
    """Hidden states of a drafted block after a long prompt, under each draft window and page size."""
    d, prompt = decoder("tiny-hybrid", kind), asked("json", shape="document")[0]
    found = []
    for window, page in windows:
        target, run = TargetRun(d.target), DrafterRun(d.drafter, d.target, window, page)
        run.inject(target.append(prompt)[1], len(prompt))
        found.append(run.block_hidden(prompt[-1], 16))
    return found


def test_a_draft_window_reaches_the_full_layer_of_an_interleaved_drafter() -> None:
    length = len(asked("json", shape="document")[0])
    whole, covering, cut = hidden_of_block("interleaved", (None, 1), (length, 1), (8, 1))
    assert torch.equal(whole, covering)
    assert not torch.allclose(whole, cut, atol=1e-3)


def test_a_draft_window_begins_on_a_page() -> None:
    window, page, prompt = 8, 16, len(asked("json", shape="document")[0])
    length = prompt - (prompt - window) // page * page
    assert window < length < window + page
    paged, same, shorter = hidden_of_block("good", (window, page), (length, 1), (window, 1))
    assert torch.equal(paged, same)
    assert not torch.allclose(paged, shorter, atol=1e-3)


@pytest.mark.parametrize("proposal", [0, 3])
def test_sampled_verification_keeps_the_targets_distribution(proposal: int) -> None:
    """First tokens over many seeds against p, for a likely and for an unlikely proposal (4 standard errors)."""
    n, temperature = 20_000, 0.7
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.5], [0.5, 0.0, 0.0, 1.0]])
    p = torch.softmax(logits / temperature, dim=-1)
    generator = torch.Generator().manual_seed(0)
    outs = [verify([proposal], logits, temperature, generator) for _ in range(n)]
    first = torch.bincount(torch.tensor([out[0] for out in outs]), minlength=4) / n
    assert ((first - p[0]).abs() < 4 * (p[0] * (1 - p[0]) / n).sqrt()).all()
    longer = [out[1] for out in outs if out[0] == proposal]
    assert all(len(out) == (2 if out[0] == proposal else 1) for out in outs)
    second = torch.bincount(torch.tensor(longer), minlength=4) / len(longer)
    assert ((second - p[1]).abs() < 4 * (p[1] * (1 - p[1]) / len(longer)).sqrt()).all()


def test_greedy_verification_stops_at_the_first_disagreement() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([5, 6, 7, 1]), 8).float()
    generator = torch.Generator()
    assert verify([5, 6, 7], logits, 0.0, generator) == [5, 6, 7, 1]
    assert verify([5, 0, 7], logits, 0.0, generator) == [5, 6]
    assert verify([0, 6, 7], logits, 0.0, generator) == [5]
    assert verify([], logits[:1], 0.0, generator) == [5]
