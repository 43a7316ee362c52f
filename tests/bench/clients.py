"""Programs of client libraries against one server: ``clients.py LIBRARY URL`` prints all that they see, as JSON.

It imports only that library, and runs in the library's own environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

LEO = "Leo has 47 cards and gives 35 away. How many cards are left?"
QUESTIONS = (
    LEO,
    "Tom has 12 apples and buys 7 more. How many apples are there?",
    "Write the item and the price as JSON.",
)
SCHEMA = {
    "type": "object",
    "properties": {"item": {"enum": ["plums", "tea"]}, "left": {"type": "boolean"}},
    "required": ["item", "left"],
    "additionalProperties": False,
}
TOOL = {"name": "look_up", "description": "Look an item up.", "parameters": SCHEMA}
# One or two calls, in the words of the parser `qwen25`.
CALL = r'"<tool_call>\n{\"name\": \"look_up\", \"arguments\": {\"item\": \"plums\", \"left\": true}}\n</tool_call>"'
EBNF = f'root ::= call | call "\\n" call\ncall ::= {CALL}'
STOPS = ({}, {"stop": ["12 cards", "cards"]}, {"stop": ["=", "4", "1"]}, {"max_tokens": 1}, {"max_tokens": 6})
Seen = Iterator[Any]


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def openai(url: str) -> Seen:
    """Chat whole and streamed, with thinking and without, parsed answers, tools, completions and responses."""
    import openai
    import pydantic

    def whole(ask: Callable[..., Any], **asked: Any) -> Any:
        """Return a parsed answer, or a stream's final one. If its length cuts a form, the answer is in the error."""
        try:
            made = ask(**asked)
            if not hasattr(made, "__enter__"):
                return made
            with made as stream:
                return stream.get_final_completion()
        except openai.LengthFinishReasonError as cut:
            return cut.completion

    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    base: dict[str, Any] = {"model": client.models.list().data[0].id, "temperature": 0}
    for question in QUESTIONS:
        for thinks in (True, False):
            extra = {"chat_template_kwargs": {"enable_thinking": thinks}}
            asked: dict[str, Any] = {**base, "messages": message(question), "extra_body": extra, "max_tokens": 64}
            for more in STOPS:
                chat = {**asked, **more}
                yield client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
                yield whole(client.chat.completions.stream, **chat, stream_options={"include_usage": True})
            yield client.chat.completions.create(**asked, n=2, frequency_penalty=0.5)
            forms = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA, "strict": True}}
            yield client.chat.completions.create(**asked, response_format=forms)
            tools = [{"type": "function", "function": TOOL}]
            for choice in ("auto", "required", {"type": "function", "function": {"name": "look_up"}}):
                yield whole(client.chat.completions.stream, **asked, tools=tools, tool_choice=choice)
            called = {**asked, "extra_body": {**extra, "ebnf": EBNF}, "tools": tools, "max_tokens": 128}
            yield client.chat.completions.create(**called)
            yield whole(client.chat.completions.stream, **called)

        class Form(pydantic.BaseModel):
            item: str = pydantic.Field(max_length=8)
            left: bool

        form = {**base, "messages": message(question), "max_tokens": 64, "response_format": Form}
        yield whole(client.chat.completions.parse, **form)
        yield client.completions.create(**base, prompt=question, max_tokens=48, echo=True, logprobs=2, stop=["="])
        chunks = client.completions.create(**base, prompt=question, max_tokens=48, stream=True)
        yield "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        response: dict[str, Any] = {**base, "input": question, "max_output_tokens": 64}
        yield client.responses.create(**response)
        *_, last = client.responses.create(**response, stream=True)
        yield last


def anthropic(url: str) -> Seen:
    """Messages whole and streamed, with stops and tools."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": SCHEMA}]
    for question in QUESTIONS:
        asked: dict[str, Any] = {"model": "default", "messages": message(question)}
        asked["extra_body"] = {"temperature": 0}
        for tokens in (2, 64):
            for more in ({}, {"stop_sequences": ["12 cards", "cards"]}, {"stop_sequences": ["=", "4", "1"]}):
                yield client.messages.create(**asked, **more, max_tokens=tokens)
                with client.messages.stream(**asked, **more, max_tokens=tokens) as stream:
                    yield stream.get_final_message()
        yield client.messages.create(**asked, tools=tools, tool_choice={"type": "any"}, max_tokens=64)
        with client.messages.stream(**asked, tools=tools, max_tokens=64) as stream:
            yield stream.get_final_message()


PROGRAMS: dict[str, Callable[[str], Seen]] = {each.__name__: each for each in (openai, anthropic)}
# Keys whose values differ between any two answers.
ITS_OWN = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "response_id", "sequence_number"}


def plain(value: Any) -> Any:
    """``value`` as JSON, without what no two answers share."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key not in ITS_OWN}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    json.dump([plain(seen) for seen in PROGRAMS[sys.argv[1]](sys.argv[2])], sys.stdout)
