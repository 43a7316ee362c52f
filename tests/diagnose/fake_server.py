"""A server with canned answers, for the logic of ``diagnose``."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """Answers SGLang's endpoints.

    Args:
        info: ``/server_info``.
        status: of every reply.
        accepted: drafts per verify step of every answer.
    """

    def __init__(self, info: dict[str, Any] | None = None, status: int = 200, accepted: int = 3) -> None:
        self.info, self.status, self.accepted = info or {}, status, accepted

    def reply(self, path: str, body: Any) -> Any:
        if path == "/server_info":
            return self.info
        if path == "/v1/tokenize":
            return {"tokens": [*json.dumps(body).encode()]}
        tokens = body["sampling_params"]["max_new_tokens"]
        steps = max(1, tokens // (self.accepted + 1))
        meta = {
            "completion_tokens": tokens,
            "finish_reason": {"type": "length"},
            "spec_verify_ct": steps,
            "spec_correct_drafts_histogram": [0] * self.accepted + [steps],
        }
        return {"text": "", "meta_info": meta}


@contextlib.contextmanager
def serve(fake: FakeServer) -> Iterator[str]:
    """Serve on a free port; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _reply(self, body: Any) -> None:
            path = self.path.partition("?")[0]
            known = path in ("/server_info", "/v1/tokenize", "/generate")
            content = json.dumps(fake.reply(path, body) if known else {})
            if path == "/generate":
                content = f"data: {content}\n\ndata: [DONE]\n\n"
            self.send_response(fake.status if known else 404)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
