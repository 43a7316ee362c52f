"""The trainers' parts: the optimizer, resuming, rows that equal the chat template, batched generation."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

from sglang_dflash.pairs import target_path
from tools.train.hf import transformers
from tools.train.loop import train
from tools.train.rows import ConversationEncoder, training_conversation
from tools.train.tokenizer import SPECIAL_TOKENS, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))


def test_a_resumed_training_ends_where_an_unbroken_one_ends(tmp_path: Path) -> None:
    def run(folder: Path, stop_at: int | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))

        def loss_of_step(i: int) -> Tensor:
            if i == stop_at:
                raise KeyboardInterrupt
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
            return (model(x) - x[:, :2]).square().mean()

        train(model, loss_of_step, lambda: 0.0, steps=230, folder=folder)
        return model[0].weight

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", stop_at=150)
    assert torch.equal(run(tmp_path / "broken", None), run(tmp_path / "unbroken", None))


def test_encoded_conversations_equal_the_chat_template(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    encoder, rng = ConversationEncoder(tokenizer), Random(0)
    kinds = set()
    for _ in range(150):
        conversation = training_conversation(rng, 2048)
        text = tokenizer.apply_chat_template(
            conversation.messages(),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=conversation.thinking,
        )
        last = conversation.turns[-1]
        text += (f"{last.thought}\n</think>\n\n" if conversation.thinking else "") + last.answer + "<|im_end|>"
        ids, weights = encoder.encode(conversation)
        assert ids == tokenizer(text)["input_ids"] and len(weights) == len(ids)
        kinds.add((conversation.thinking, bool(conversation.system), len(conversation.turns) > 1))
    assert len(kinds) >= 6


def test_the_thinking_switch_and_the_forgotten_thoughts(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
        {"role": "user", "content": "Bye"},
    ]

    def render(**switch: bool) -> str:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **switch)

    before = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert render(enable_thinking=True) == before + "<|im_start|>assistant\n<think>\n"
    assert render() == render(enable_thinking=False) == before + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_tokenizer_specials_round_trip_and_reproduction(
    tokenizer: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert len(tokenizer) == 1024 and tokenizer.mask_token_id == 3 and tokenizer.eos_token_id == 2
    text = "Grüße, 23 äpfel!\n\tdef f(x): return x ** 2  # 日本"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert 3 not in tokenizer("mask <mask> [MASK]")["input_ids"]
    again = train_tokenizer(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
