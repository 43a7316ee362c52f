"""Canned answers of a DFLASH server, for the logic of ``diagnose``."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INFO: dict[str, Any] = {
    "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": "drafter",
    "speculative_num_draft_tokens": 16,
    "skip_tokenizer_init": False,
    "model_path": "target",
    "max_req_input_len": 8186,
    "launch_command": "--model-path target",
    "internal_states": [{"avg_spec_accept_length": 2.5}],
}
WORKER: dict[str, Any] = {
    "adaptive": False,
    "requests": {"asked": 48, "running": 48, "capped_by": "--max-running-requests"},
    "drafting": {"pays": True, "accept_length": 6.5, "break_even": 1.5, "known": {}},
    "width": {"policy": "fixed", "widths": [16]},
}


def server_info(launch_command: str = "", **worker: Any) -> dict[str, Any]:
    """``/server_info`` with our worker's entry."""
    return INFO | {"launch_command": launch_command, "internal_states": [{"sglang_dflash": WORKER | worker}]}


def meta(tokens: int, accepted: int, **more: Any) -> dict[str, Any]:
    """SGLang's figures of an answer, each of whose steps accepted as many drafts."""
    steps = max(1, tokens // (accepted + 1))
    histogram = [0] * accepted + [steps] + [0] * (15 - accepted)
    return {"completion_tokens": tokens, "spec_verify_ct": steps, "spec_correct_drafts_histogram": histogram, **more}


@contextlib.contextmanager
def serve(
    info: dict[str, Any] | None = None,
    status: int = 200,
    accepted: int = 3,
    answers: int = 1000,
    stuck: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Serve on a free port; yields the URL.

    Args:
        status: of every reply.
        accepted: drafts per verify step of every answer.
        answers: number of prompts that are answered; the first one beyond them calls ``stuck``.
    """
    left, ended = iter(range(answers)), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(info)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/v1/tokenize":
                self._reply({"tokens": [*json.dumps(body).encode()]})
            elif next(left, None) is None:
                stuck()
                ended.wait()
            else:
                self._reply({"text": "", "meta_info": meta(body["sampling_params"]["max_new_tokens"], accepted)})

        def _reply(self, content: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        ended.set()
        http.shutdown()
        http.server_close()
        thread.join()
