"""A server that answers SGLang's endpoints with canned tokens, for the logic of `diagnose`."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeServer:
    """Notes every call in ``calls``; ``answer`` maps a prompt's token ids to the generated ones.

    Attributes:
        block: block size it reports, None for a server without speculation.
        ours: whether it shows our worker's entry.
        on_generate: called before each answer, to break things at a chosen moment.
        finish: type of every answer's finish reason.
    """

    block: int | None = None
    ours: bool = True
    answer: Callable[[list[int]], list[int]] = lambda prompt: [prompt[0], 7, 8]
    on_generate: Callable[[], None] = lambda: None
    finish: str = "stop"
    calls: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""

    def generations(self) -> list[list[int]]:
        """Prompts asked with the full token budget, so without the warm-up's."""
        return [b["input_ids"] for p, b in self.calls if p == "/generate" and not b["sampling_params"]["ignore_eos"]]

    def reply(self, path: str, body: Any) -> tuple[int, list[dict[str, Any]]]:
        """-> status and events; one event is sent as plain JSON, except for /generate."""
        self.calls.append((path, body))
        if path == "/v1/tokenize":
            text = json.dumps(body["messages"])
            return 200, [{"tokens": [sum(text.encode()) % 1000, len(text)]}]
        if path == "/server_info":
            return 200, [self._info()]
        if path == "/generate":
            self.on_generate()
            return 200, self._events(body)
        return 200, [{}]

    def _info(self) -> dict[str, Any]:
        state: dict[str, Any] = {"avg_spec_accept_length": 1.5} if self.block else {}
        if self.block and self.ours:
            state["sglang_dflash"] = {"version": "0", "steps_by_width": {str(self.block): len(self.generations())}}
        return {
            "speculative_algorithm": "DFLASH" if self.block else None,
            "speculative_num_draft_tokens": self.block,
            "internal_states": [state],
        }

    def _events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        ids = self.answer(body["input_ids"])[: body["sampling_params"]["max_new_tokens"]]
        meta = {"id": uuid.uuid4().hex, "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0}
        if self.block:
            meta |= {"spec_verify_ct": 1, "spec_correct_drafts_histogram": [0] * (len(ids) - 1) + [1]}
        return [
            {
                "text": " ".join(map(str, ids[:n])),
                "output_ids": ids[:n],
                "meta_info": {**meta, "completion_tokens": n, "finish_reason": {"type": self.finish}},
            }
            for n in range(1, len(ids) + 1)
        ]


@contextlib.contextmanager
def serve(fake: FakeServer) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            self._reply(json.loads(content) if content else None)

        def _reply(self, body: Any) -> None:
            path = self.path.partition("?")[0]
            status, events = fake.reply(path, body)
            if path == "/generate":
                content = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            else:
                content = json.dumps(events[0])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield fake
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
