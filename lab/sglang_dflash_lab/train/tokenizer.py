"""The byte-level BPE of all tiny pairs, and its chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_dflash_lab.pairs.corpus import SHAPES, TASKS, draw, draw_conversation
from sglang_dflash_lab.train.hf import transformers

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<think>", "</think>")
# Qwen's split: each digit is a piece, which keeps arithmetic learnable.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# ChatML as Qwen's: earlier answers without thoughts; thinking is off unless requested.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and '</think>' in message.content -%}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{%- else -%}{{ message.content }}{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\n<think>\n' }}"
    "{%- if not (enable_thinking is defined and enable_thinking is true) -%}"
    "{{ '\n</think>\n\n' }}"
    "{%- endif -%}"
    "{%- endif -%}"
)


def train_tokenizer(folder: Path, seed: int = 0, documents: int = 6000) -> transformers.PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(Random(f"tokenizer/{seed}"), documents), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _texts(rng: Random, documents: int) -> Iterator[str]:
    for _ in range(documents):
        shape = rng.choices(SHAPES, (0.9, 0.07, 0.03))[0]
        conversation = draw_conversation(rng, shape, lambda: draw(rng.choice(TASKS), "train", rng))
        yield f"system\n{conversation.system}"
        for turn in conversation.turns:
            yield f"user\n{turn.question}"
            yield f"assistant\n{turn.thought}\n{turn.answer}"
