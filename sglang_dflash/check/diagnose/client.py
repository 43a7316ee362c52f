"""An HTTP client of an SGLang server."""

from __future__ import annotations

import json
from typing import Any, Self

import httpx

from sglang_dflash.errors import DFlashError

Message = dict[str, str]
WORKER_KEY = "sglang_dflash"  # in the internal state of ``/server_info``


class Client:
    """A client of one server, as an async context manager. Every method can raise DFlashError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        # the environment's proxies are meant for the internet
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(base_url=self._url, timeout=3600, trust_env=False, headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def server_info(self) -> dict[str, Any]:
        return await self._request("GET", "/server_info")

    async def tokenize(self, **prompt: Any) -> list[int]:
        """Return the token ids of templated ``messages`` or of a raw ``prompt``."""
        return list((await self._request("POST", "/v1/tokenize", json=prompt))["tokens"])

    async def generate(self, input_ids: list[int], max_tokens: int, temperature: float) -> dict[str, Any]:
        """Return SGLang's ``meta_info``."""
        sampling = {"max_new_tokens": max_tokens, "temperature": temperature}
        sampling |= {"sampling_seed": 0} if temperature else {}
        body = {"input_ids": input_ids, "sampling_params": sampling}
        return dict((await self._request("POST", "/generate", json=body))["meta_info"])

    async def _request(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, **content)
            what = f"{method} {response.request.url} answered {response.status_code}"
            if response.status_code in (401, 403):
                remedy = "pass the key that the server was started with: --api-key KEY"
                raise DFlashError(what, remedy=remedy)
            if response.is_error:
                what = f"{what}: {response.text[:500]}"
                raise DFlashError(what, remedy="see the server's log")
            return dict(response.json())
        except (httpx.TransportError, json.JSONDecodeError) as error:
            raise DFlashError(
                f"no SGLang server answers at {self._url} ({str(error) or type(error).__name__})",
                remedy="check host and port, and that the server has finished starting",
            ) from error
