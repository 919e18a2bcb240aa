"""Requests to an OpenAI-compatible chat endpoint, repeated while a failure may pass.

Servers fail in ways that pass (429, 5xx, time-outs, torn connections: repeated with growing pauses, or after the pause
that ``Retry-After`` names) and in ways that do not (a wrong key, an unknown model: reported at once).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Self, TypeVar

import aiohttp

from pipeline.files import ServerError

RETRYABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
BODY_CHARS = 200  # of an error's body that are shown

SchemaMode = Literal["json_schema", "json_object", "none"]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where to ask, and how patiently.

    ``retries`` counts the attempts after the first; ``timeout_s`` is for one attempt.
    """

    base_url: str
    model: str
    api_key: str = ""
    timeout_s: float = 300.0
    retries: int = 5
    schema_mode: SchemaMode = "json_schema"

    @property
    def url(self) -> str:
        root = self.base_url.rstrip("/").removesuffix("/v1")
        return f"{root}/v1/chat/completions"


class Again(Exception):
    """This attempt failed in a way that may pass; ``pause_s`` if the server said when to come back."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class EndpointClient:
    """A client for one endpoint; use it as an async context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self.endpoint.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)  # the caller's concurrency is the limit
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def repeat(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """The first result of ``attempt(0)``, ``attempt(1)``, ... that is not ``Again``.

        Raises:
            ServerError: all attempts failed, or one failed in a way that will not pass.
        """
        pause, reason = FIRST_PAUSE_S, ""
        for index in range(self.endpoint.retries + 1):
            try:
                return await attempt(index)
            except Again as failed:
                reason = str(failed)
                # Clients that failed together do not come back together.
                wait = failed.pause_s if failed.pause_s is not None else pause * random.uniform(0.5, 1.0)
                pause = min(pause * 2, LONGEST_PAUSE_S)
            if index < self.endpoint.retries:
                await asyncio.sleep(min(wait, LONGEST_PAUSE_S))
        raise ServerError(f"{self.endpoint.url}: {reason} ({self.endpoint.retries + 1} attempts); check the server")

    async def post(self, body: dict[str, Any]) -> str:
        """The text of the answer to one request.

        Raises:
            Again: it failed in a way that may pass.
            ServerError: it failed in a way that will not.
        """
        assert self._session is not None, "use the client as an async context manager"
        try:
            async with self._session.post(self.endpoint.url, json=body) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    self._refuse(response.status, text, response.headers.get("Retry-After"))
        except TimeoutError:
            raise Again(f"no answer within {self.endpoint.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Again(f"cannot be reached ({type(error).__name__}: {error})") from None
        return text

    def _refuse(self, status: int, text: str, retry_after: str | None) -> None:
        detail = " ".join(text.split())[:BODY_CHARS]
        if status in RETRYABLE:
            pause = float(retry_after) if retry_after and retry_after.isdecimal() else None
            raise Again(f"HTTP {status}: {detail}", pause)
        raise ServerError(f"{self.endpoint.url}: HTTP {status}: {detail}; check --model, the key and the limits")
