"""The few endpoints of an SGLang server that a diagnosis or a benchmark needs.

``/generate`` is used rather than the OpenAI route because it takes token ids, so that every arm gets the same bytes,
and answers with token ids, so that arms can be compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import httpx

from sglang_dflash.errors import DFlashError

Message = dict[str, str]
WORKER_KEY = "sglang_dflash"  # our worker's entry in the internal state of ``/server_info``
_EVENT = b"data: "
_DONE = b"[DONE]"
_ERROR = b'{"error"'


@dataclass(frozen=True)
class Sampling:
    """Sampling of a run. ``seed`` matters above temperature 0 only; ``thinking`` None leaves it to the template."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    thinking: bool | None = None
    ignore_eos: bool = False

    def parameters(self) -> dict[str, Any]:
        """SGLang's ``sampling_params``."""
        return {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
        } | ({"sampling_seed": self.seed} if self.temperature else {})


@dataclass(frozen=True)
class Generation:
    """A finished stream: times in seconds since sending, and the server's last event, parsed when it is asked for."""

    ttft_s: float
    latency_s: float
    payload: bytes

    @cached_property
    def event(self) -> dict[str, Any]:
        """``text``, ``output_ids`` and ``meta_info`` of the whole answer; DFlashError if it was aborted."""
        event: dict[str, Any] = json.loads(self.payload)
        if event["meta_info"]["finish_reason"]["type"] == "abort":
            raise _unhealthy(f"a request was aborted: {event['meta_info']}")
        return event


class Client:
    """An HTTP client of one server; use as an async context manager.

    Args:
        api_key: what the server was started with (``--api-key``); None for none.
    """

    def __init__(self, base_url: str, timeout_s: float = 3600.0, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # Proxies of the environment are meant for the internet, not for a server under test.
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=timeout_s,
            limits=limits,
            trust_env=False,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def tokenize(self, messages: list[Message], thinking: bool | None) -> list[int]:
        """Token ids of the conversation as the server's chat template renders it, generation prompt included."""
        body: dict[str, Any] = {"messages": messages}
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        return await self._tokens(body)

    async def tokenize_text(self, text: str) -> list[int]:
        """Token ids of a raw prompt, as ``/v1/completions`` would take it."""
        return await self._tokens({"prompt": text})

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        return list((await self._request("POST", "/v1/tokenize", json=body)).json()["tokens"])

    async def generate(self, input_ids: list[int], sampling: Sampling) -> Generation:
        """Stream one answer and time it."""
        start = time.perf_counter()
        first = end = 0.0
        last = b""
        async for arrived, payload in self.events(input_ids, sampling):
            first = first or arrived
            end, last = arrived, payload
        if last.startswith(_ERROR):
            raise _unhealthy(f"POST {self.base_url}/generate was given up: {last.decode()}")
        return Generation(first - start, end - start, last)

    async def events(self, input_ids: list[int], sampling: Sampling) -> AsyncIterator[tuple[float, bytes]]:
        """The stream's events, unparsed, each with the time it arrived.

        Parsing is left to the caller: on a small machine a client that parses every event of every request takes the
        time that it measures. Text and ids of an event are cumulative, so the last one has everything.
        """
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling.parameters(), "stream": True}
        pending = b""
        async with self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                await response.aread()
            _check(response)
            async for chunk in response.aiter_raw():
                arrived = time.perf_counter()
                *events, pending = (pending + chunk).split(b"\n\n")
                for event in events:
                    payload = event.removeprefix(_EVENT)
                    if payload != _DONE:
                        yield arrived, payload

    async def flush_cache(self) -> None:
        """Empty the prefix cache, waiting for the last request to leave the batch."""
        await self._request("POST", "/flush_cache", params={"timeout": 30})

    async def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = (await self.get("/server_info")).json()
        return info

    async def get(self, path: str) -> httpx.Response:
        return await self._request("GET", path)

    async def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        response = await self._http.request(method, path, **kwargs)
        _check(response)
        return response


def _check(response: httpx.Response) -> None:
    request = response.request
    if response.status_code in (401, 403):
        raise DFlashError(
            f"{request.method} {request.url} answered {response.status_code}",
            expected="a server that lets this client in",
            remedy="give the key that the server was started with: --api-key KEY",
        )
    if response.is_error:
        raise _unhealthy(f"{request.method} {request.url} answered {response.status_code}: {response.text[:500]}")


def _unhealthy(what: str) -> DFlashError:
    return DFlashError(what, expected="a healthy SGLang 0.5.23 server", remedy="see the server's log")
