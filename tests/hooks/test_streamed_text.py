"""Streamed text is the whole answer's, in chunks of any number of tokens: SGLang's detokenizer with our hook."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, repeat
from types import SimpleNamespace as Some
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.managers import detokenizer_manager
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_dflash_lab.pairs import target_path
from tests.fuzz.values import fuzz

pytestmark = pytest.mark.sglang

SENT_TWICE = "漢글漢글"  # by SGLang alone, with byte fallback, in chunks of 3, 1, 1 ... tokens
JOINED = ["👩‍👩‍👧", "🏳️‍🌈", "👍🏽", "e\u0301"]
SCRIPTS = [
    [*"aéñŁß, ", "hello"], [*"жыё. "], [*"漢字仮。한글\n"], [*"🙂👍", *JOINED], [*"مرحبا "], [*"漢é🙂 ", *JOINED],
    [*"aéжы漢字한م🙂 \n\ufffd", "hello", *JOINED, "<think>", "<|im_end|>"],
]  # fmt: skip


@cache
def tokenizer(kind: str) -> Any:
    if kind == "tiny-hybrid":
        return AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))
    if kind == "bytes":
        backend = Tokenizer(models.BPE({each: n for n, each in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aehlołжы漢,.🙂", "▁a"]
        vocabulary = {word: n for n, word in enumerate(words)}
        backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        spaces, first = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
        backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), first])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def streamed(tokens: Any, prompt: list[int], ids: list[int], sizes: Iterator[int], skip: bool) -> list[str]:
    """What a client receives of ``ids``, in chunks of ``sizes`` tokens, from a detokenizer without its process."""
    manager = object.__new__(detokenizer_manager.DetokenizerManager)
    vars(manager).update(
        tokenizer=tokens, vocab_size=len(tokens), decode_status=detokenizer_manager.LimitedCapacityDict(capacity=1),
        disable_tokenizer_batch_decode=False, is_tool_call_parser_gpt_oss=False, tool_close_token_ids=frozenset(),
    )  # fmt: skip
    pieces, rest = list[str](), ids
    while rest:
        size = next(sizes)
        chunk, rest = rest[:size], rest[size:]
        batch = Some(
            rids=["r"], decoded_texts=[""], decode_ids=[chunk if pieces else prompt + chunk], no_stop_trim=[False],
            read_offsets=[len(prompt)], skip_special_tokens=[skip], spaces_between_special_tokens=[True],
            finished_reasons=[None if rest else {"type": "length"}],
        )  # fmt: skip
        pieces += manager._decode_batch_token_id_output(batch)
    return pieces


@pytest.mark.parametrize("kind", ["tiny-hybrid", "bytes", "byte-fallback"])
@fuzz
@example(text=SENT_TWICE, sizes=[3, 1], cut=0, skip=True)
@given(
    text=st.sampled_from(SCRIPTS).flatmap(lambda script: st.lists(st.sampled_from(script), min_size=9)).map("".join),
    sizes=st.integers(1, 64).flatmap(lambda most: st.lists(st.integers(1, most), min_size=1)),
    cut=st.integers(0, 5),
    skip=st.booleans(),
)
def test_chunks_join_to_the_text(serve: Any, kind: str, text: str, sizes: list[int], cut: int, skip: bool) -> None:
    """An answer may be cut inside a character, except with byte fallback: there SGLang's whole text differs too."""
    tokens = tokenizer(kind)
    prompt, ids = (tokens.encode(each, add_special_tokens=False) for each in ("hello", text))
    ids = ids[: max(1, len(ids) - cut)] if kind != "byte-fallback" else ids
    whole = tokens.decode(prompt + ids, skip_special_tokens=skip)[len(tokens.decode(prompt)) :]
    serve(True)
    pieces = streamed(tokens, prompt, ids, chain(sizes, repeat(sizes[-1])), skip)
    serve(False)
    assert "".join(pieces) == "".join(streamed(tokens, prompt, ids, repeat(1), skip)) == whole
    if (kind, text) == ("byte-fallback", SENT_TWICE):  # nothing changes where our worker does not serve
        assert "".join(streamed(tokens, prompt, ids, chain([3], repeat(1)), skip)) == " 漢漢글漢글"
