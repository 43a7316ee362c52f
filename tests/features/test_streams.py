"""Streamed answers from steps of many tokens: text, calls and thoughts are those of single tokens, with our hooks.

Text comes from SGLang's detokenizer; calls and thoughts from every parser of SGLang. What a parser returns for one
token at a time is the definition, its faults included.
"""

from __future__ import annotations

import json
import pkgutil
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, pairwise, repeat
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.managers import detokenizer_manager
from sglang.srt.parser.beam import BEAM_RESPONSE_TEMPLATE
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.plugins.hook_registry import _wrap_fn
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_dflash.features import streams
from sglang_dflash_lab.pairs import target_path
from tests.fuzz.values import fuzz

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[bool], None]]:
    """The returned function applies the hooks, or undoes them."""
    with pytest.MonkeyPatch.context() as patch:

        def serve(ours: bool) -> None:
            patch.undo()
            for table in (streams.TOKENIZER_HOOKS, streams.DETOKENIZER_HOOKS) if ours else ():
                for path, how, hook in table.functions():
                    patch.setattr(path, _wrap_fn(pkgutil.resolve_name(path), hook, how))

        yield serve


SENT_TWICE = "漢글漢글"  # by SGLang alone, with byte fallback, in chunks of 3, 1, 1 ... tokens
JOINED = ["👩‍👩‍👧", "🏳️‍🌈", "👍🏽", "e\u0301"]
SCRIPTS = [
    [*"aéñŁß, ", "hello"], [*"жыё. "], [*"漢字仮。한글\n"], [*"🙂👍", *JOINED], [*"مرحبا "], [*"漢é🙂 ", *JOINED],
    [*"aéжы漢字한م🙂 \n\ufffd", "hello", *JOINED, "<think>", "<|im_end|>"],
]  # fmt: skip


@cache
def text_tokenizer(kind: str) -> Any:
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
    tokens = text_tokenizer(kind)
    prompt, ids = (tokens.encode(each, add_special_tokens=False) for each in ("hello", text))
    ids = ids[: max(1, len(ids) - cut)] if kind != "byte-fallback" else ids
    whole = tokens.decode(prompt + ids, skip_special_tokens=skip)[len(tokens.decode(prompt)) :]
    serve(True)
    pieces = streamed(tokens, prompt, ids, chain(sizes, repeat(sizes[-1])), skip)
    serve(False)
    assert "".join(pieces) == "".join(streamed(tokens, prompt, ids, repeat(1), skip)) == whole
    if (kind, text) == ("byte-fallback", SENT_TWICE):  # what SGLang sends
        assert "".join(streamed(tokens, prompt, ids, chain([3], repeat(1)), skip)) == " 漢漢글漢글"


# Calls: what precedes them, a call, what is between calls, what follows them, a parameter, what is between parameters.
# Thoughts: answers whose format is more than two markers.
FORMATS = json.loads((Path(__file__).parents[1] / "fixtures/parsers.json").read_text(encoding="utf-8"))
CALLS = {name: layout for names, layout in FORMATS["calls"].items() for name in names.split()}
WEATHER, TABLE, TIME = FORMATS["functions"].items()
SCHEMAS = [(name, {"properties": dict.fromkeys(keys, {"type": "string"})}) for name, keys in (WEATHER, TABLE, TIME)]
TOOLS = [Tool(function=Function(name=name, parameters=schema)) for name, schema in SCHEMAS]
THOUGHT, ANSWER = "I weigh Łódź against 漢字 🙂 <now> and\nthen.\n", "\n\nIt is 42 < 43, and </b> so on."
MARKER = re.compile(r"</?[^<>{}\n= ]+>|<\|\"\|>|\[/?[A-Z_]+\]|\]<\]minimax\[>\[|◁/?think▷")


def calls(name: str, *made: tuple[str, dict[str, str]]) -> str:
    before, call, between, after, parameter, separator = (CALLS[name] + [""] * 4)[:6]
    texts = []
    for index, (function, arguments) in enumerate(made):
        params = separator.join(parameter.replace("KEY", key).replace("VALUE", arguments[key]) for key in arguments)
        text = call.replace("NAME", function).replace("INDEX", str(index)).replace("PARAMS", params)
        texts.append(text.replace("JSON", json.dumps(arguments, ensure_ascii=False)))
    return before + between.join(texts) + after


def with_calls(name: str) -> list[str]:
    texts = [calls(name, *made) for made in [(WEATHER,), (WEATHER, TABLE), (WEATHER, TIME), (TIME,)]]
    return texts if name == "json" else [*texts, f"I look: {texts[0]} That is all."]


def with_thoughts(name: str) -> list[str]:
    detector = ReasoningParser(name, tokenizer=Some(response_template=BEAM_RESPONSE_TEMPLATE)).detector
    start, end = detector.think_start_token + detector.think_start_self_label, detector.think_end_token
    whole = FORMATS["thoughts"].get(name, start + THOUGHT + end + ANSWER)
    tool = getattr(detector, "tool_start_token", None) or ""
    return [whole, start + THOUGHT, THOUGHT + end + ANSWER, f"a{start}b{end}c", f"{start}a{tool}b{end}c"]


PARSERS = [(with_calls, name) for name in (*FunctionCallParser.ToolCallParserEnum, "mistral:compact", "json")]
PARSERS += [(with_thoughts, name) for name in ReasoningParser.DetectorMap]


@cache
def tokenizer(has_markers: bool) -> Any:
    texts = [text for answers, name in PARSERS for text in answers(name)]
    markers = sorted(set(MARKER.findall("\n".join(texts)))) if has_markers else []
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    backend.add_special_tokens(markers)
    return PreTrainedTokenizerFast(tokenizer_object=backend, response_template=BEAM_RESPONSE_TEMPLATE)


def single_tokens(text: str, tokens: Any, draw: random.Random) -> list[tuple[str, list[int]]]:
    """Tokens that a model may write for ``text``, where the tokenizer may choose others: pairs of text and ids.

    Tokens that end inside a character add no text; the pair of the next token has their ids.
    """
    found: list[tuple[str, list[int]]] = []
    for part in re.findall(rf".{{{draw.randint(5, 30)}}}|.+", text, re.DOTALL):
        encoded, start, ids = tokens.backend_tokenizer.encode(part), 0, list[int]()
        for (_, end), following, token in zip(encoded.offsets, [*encoded.offsets[1:], None], encoded.ids, strict=True):
            ids.append(token)
            if following is None or following[1] > end:
                found.append((part[start:end], ids))
                start, ids = end, []
    return found


def received(answers: Any, name: str, tokens: Any, steps: list[tuple[str, list[int]]]) -> Any:
    """What a client receives, and what SGLang reads of the parser at the end for arguments that were not streamed."""
    written: list[int] = []

    def fed(parse: Callable[[str], Any]) -> Iterator[Any]:
        for text, ids in steps:
            written.extend(ids)
            streams._answer.set((tokens, {"output_ids": written}))
            yield parse(text)

    if answers is with_thoughts:
        thoughts = ReasoningParser(name, tokenizer=tokens)
        results = [*fed(thoughts.parse_stream_chunk), thoughts.parse_stream_end()]
        return ["".join(filter(None, texts)) for texts in zip(*results, strict=True)]
    parser = FunctionCallParser(TOOLS, "hermes" if name == "json" else name.partition(":")[0], tokenizer=tokens)
    if name == "json":  # of a required tool; only the hook of its own method splits text
        parser.detector, parser.reads_whole_answer = JsonArrayParser(), True
    results = [*fed(parser.parse_stream_chunk), parser.parse_stream_end()]
    made: dict[tuple[int, str], str] = {}
    for call in chain(*(each for _, each in results)):
        made[call.tool_index, "name"] = made.get((call.tool_index, "name"), "") + (call.name or "")
        made[call.tool_index, "arguments"] = made.get((call.tool_index, "arguments"), "") + call.parameters
    detector = parser.detector
    return "".join(text for text, _ in results), made, detector.prev_tool_call_arr, detector.streamed_args_for_tool


@pytest.mark.parametrize("kind", ["markers", "no markers", "no tokens"])
@pytest.mark.parametrize(("answers", "name"), PARSERS)
def test_steps_are_parsed_as_single_tokens(serve: Callable[[bool], None], answers: Any, name: str, kind: str) -> None:
    tokens, draw = tokenizer(kind != "no markers"), random.Random(name)
    for text in answers(name):
        whole = single_tokens(text, tokens, draw)
        if kind == "no tokens":  # then text is parsed by markers and characters
            whole = [(match[0], []) for match in re.finditer(f"{MARKER.pattern}|.", text, re.DOTALL)]
        for pieces in (whole, whole[:-3]):
            serve(False)
            expected = received(answers, name, tokens, pieces)
            serve(True)
            for cuts in (range(16, len(pieces), 16), sorted(draw.sample(range(1, len(pieces)), len(pieces) // 9))):
                parts = [pieces[start:end] for start, end in pairwise([0, *cuts, len(pieces)])]
                steps = [("".join(text for text, _ in part), [*chain(*(ids for _, ids in part))]) for part in parts]
                assert received(answers, name, tokens, steps) == expected


def test_a_call_is_two_events_and_what_is_no_step_is_parsed_at_once(serve: Callable[[bool], None]) -> None:
    serve(True)
    streams._answer.set((tokenizer(True), {}))
    answer, whole, seen = calls("hermes", WEATHER), FunctionCallParser(TOOLS, "hermes"), list[str]()
    assert [bool(item.name) for item in whole.parse_stream_chunk(answer)[1]] == [True, False]
    items = streams.parse(lambda _, text: ([ToolCallItem(tool_index=text < "e", parameters=text)],), None, answer)[0]
    assert len(items) > 1 and all(one.tool_index != two.tool_index for one, two in pairwise(items))
    whole.parse_non_stream(answer)
    for tokens, parser, text in [(True, None, ""), (True, None, "a"), (True, whole, answer), (False, None, answer)]:
        streams._answer.set((tokenizer(True) if tokens else None, {}))
        assert streams.parse(lambda _, piece: (seen.append(piece), None), parser, text) == (None, None)
        assert seen.pop() == text and not seen
