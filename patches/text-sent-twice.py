"""A stream sends each character once, if chunks of several tokens end inside characters."""

from collections import defaultdict
from types import SimpleNamespace

from sglang.srt.managers.detokenizer_manager import DetokenizerManager

steps = "你".encode() + b"\xc3", b"\xa9a\xc3", b"\xa9"  # a token is a byte


def decode(tokens, **_):
    return bytes(tokens).decode(errors="replace")


manager = object.__new__(DetokenizerManager)
manager.__dict__.update(
    vocab_size=256,
    decode_status={},
    disable_tokenizer_batch_decode=True,
    tokenizer=SimpleNamespace(decode=decode),
    is_tool_call_parser_gpt_oss=False,
)
sent = ""
for step in steps:
    one = defaultdict(lambda: [False], rids=["r"], decoded_texts=[""], decode_ids=[list(step)], read_offsets=[0])
    message = SimpleNamespace(**one, finished_reasons=[None], no_stop_trim=[False])
    message.skip_special_tokens, message.spaces_between_special_tokens = [True], [True]
    sent += manager._decode_batch_token_id_output(message)[0]
assert sent == b"".join(steps).decode(), sent
