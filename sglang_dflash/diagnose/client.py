"""An HTTP client for the endpoints of an SGLang server that a diagnosis needs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Self

import httpx

from sglang_dflash.errors import DFlashError

Message = dict[str, str]
WORKER_KEY = "sglang_dflash"  # this package's entry in the internal state of ``/server_info``


@dataclass(frozen=True)
class Generation:
    """An answer: SGLang's ``meta_info``, and seconds from sending to the first and to the last event."""

    meta: dict[str, Any]
    first_s: float
    last_s: float


class Client:
    """A client of one server; use it as an async context manager.

    Args:
        api_key: the server's ``--api-key``.
    """

    def __init__(self, base_url: str, timeout_s: float = 3600.0, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        # trust_env=False: the environment's proxies are meant for the internet.
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(base_url=self.base_url, timeout=timeout_s, trust_env=False, headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def tokenize(self, messages: list[Message], thinking: bool | None) -> list[int]:
        """Return the token ids of a conversation, rendered by the server's chat template."""
        switch = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        return await self._tokens({"messages": messages, **switch})

    async def tokenize_text(self, text: str) -> list[int]:
        """Return the token ids of a raw prompt."""
        return await self._tokens({"prompt": text})

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        return list((await self._request("POST", "/v1/tokenize", json=body)).json()["tokens"])

    async def generate(self, input_ids: list[int], max_tokens: int, temperature: float) -> Generation:
        """Stream one answer and time it.

        Raises:
            DFlashError: the server reports an error, or aborted the request.
        """
        sampling = {"max_new_tokens": max_tokens, "temperature": temperature}
        sampling |= {"sampling_seed": 0} if temperature else {}
        body = {"input_ids": input_ids, "sampling_params": sampling, "stream": True}
        start, first, last, event = time.perf_counter(), 0.0, 0.0, "{}"
        async with self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                await response.aread()
            _check(response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    last, event = time.perf_counter() - start, line.removeprefix("data: ")
                    first = first or last
        meta = json.loads(event).get("meta_info")
        if meta is None or meta["finish_reason"]["type"] == "abort":
            raise _unhealthy(f"POST {self.base_url}/generate failed: {event}")
        return Generation(meta, first, last)

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
            expected="access to the server",
            remedy="pass the key that the server was started with: --api-key KEY",
        )
    if response.is_error:
        raise _unhealthy(f"{request.method} {request.url} answered {response.status_code}: {response.text[:500]}")


def _unhealthy(what: str) -> DFlashError:
    return DFlashError(what, expected="a healthy SGLang 0.5.23 server", remedy="see the server's log")
