"""Requests to an OpenAI-compatible chat endpoint whose answers must be JSON of a given schema.

Servers fail in ways that pass (429, 5xx, time-outs, torn connections: retried with growing pauses) and in ways that
do not (a wrong key, an unknown model: reported at once). An answer that violates the schema is asked for again; it is
never repaired.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from typing import Any, Literal

import aiohttp
import jsonschema

from pipeline.files import ServerError

RETRYABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
BODY_CHARS = 200  # of an error's body that are shown

SchemaMode = Literal["json_schema", "json_object", "none"]


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


@dataclasses.dataclass
class Usage:
    """Tokens and requests so far; failed attempts that were answered count too, since they cost."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, raw: Any) -> Usage:
        """The usage object of one answer; servers that send none count as 0 tokens."""
        counts = [raw.get(k) if isinstance(raw, dict) else 0 for k in ("prompt_tokens", "completion_tokens")]
        return cls(1, *(c if isinstance(c, int) and c > 0 else 0 for c in counts))

    def add(self, other: Usage) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens


@dataclasses.dataclass(frozen=True)
class Answer:
    """JSON that satisfies the schema, and what it cost with all its attempts."""

    data: Any
    usage: Usage


class _Again(Exception):
    """This attempt failed in a way that may pass."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class ChatClient:
    """A client for one endpoint; use it as an async context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.usage = Usage()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatClient:
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self.endpoint.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)  # the caller's concurrency is the limit
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, system: str, user: str, schema: dict[str, Any], *, max_tokens: int, temperature: float, seed: int
    ) -> Answer:
        """An answer that satisfies ``schema``. A retry uses the next seed.

        Raises:
            ServerError: all attempts failed, or one failed in a way that will not pass.
        """
        pause = FIRST_PAUSE_S
        reason = ""
        cost = Usage()
        for attempt in range(self.endpoint.retries + 1):
            body = self._body(system, user, schema, max_tokens, temperature, seed + attempt)
            try:
                return Answer(_checked(self._content(await self._post(body), cost), schema), cost)
            except _Again as failed:
                reason = str(failed)
                wait = failed.pause_s if failed.pause_s is not None else pause * random.uniform(0.5, 1.0)
                pause = min(pause * 2, LONGEST_PAUSE_S)
            if attempt < self.endpoint.retries:
                await asyncio.sleep(min(wait, LONGEST_PAUSE_S))
        raise ServerError(f"{self.endpoint.url}: {reason} ({self.endpoint.retries + 1} attempts); check the server")

    def _body(
        self, system: str, user: str, schema: dict[str, Any], max_tokens: int, temperature: float, seed: int
    ) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body: dict[str, Any] = {"model": self.endpoint.model, "messages": messages, "max_tokens": max_tokens}
        body |= {"temperature": temperature, "seed": seed}
        if self.endpoint.schema_mode == "json_schema":
            described = {"name": "answer", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": described}
        elif self.endpoint.schema_mode == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body

    async def _post(self, body: dict[str, Any]) -> str:
        assert self._session is not None, "use the client as an async context manager"
        try:
            async with self._session.post(self.endpoint.url, json=body) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    self._refuse(response.status, text, response.headers.get("Retry-After"))
        except TimeoutError:
            raise _Again(f"no answer within {self.endpoint.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Again(f"cannot be reached ({type(error).__name__}: {error})") from None
        return text

    def _refuse(self, status: int, text: str, retry_after: str | None) -> None:
        detail = " ".join(text.split())[:BODY_CHARS]
        if status in RETRYABLE:
            pause = float(retry_after) if retry_after and retry_after.isdecimal() else None
            raise _Again(f"HTTP {status}: {detail}", pause)
        raise ServerError(f"{self.endpoint.url}: HTTP {status}: {detail}; check --model, the key and the limits")

    def _content(self, text: str, cost: Usage) -> str:
        """The message of a chat completion; its tokens are added to ``cost`` and to the client's total."""
        try:
            data = json.loads(text)
            choice = data["choices"][0]
            content = choice["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise _Again(f"expected a chat completion, found {text[:80]!r}") from None
        usage = Usage.of(data.get("usage"))
        cost.add(usage)
        self.usage.add(usage)
        if choice.get("finish_reason") == "length":
            raise _Again("the answer was cut at the token limit; raise --max-tokens")
        if not isinstance(content, str):
            raise _Again(f"expected text, found {content!r:.60}")
        return content


def _checked(content: str, schema: dict[str, Any]) -> Any:
    try:
        answer = json.loads(content)
        jsonschema.validate(answer, schema)
    except (ValueError, RecursionError):
        raise _Again(f"the answer is not JSON: {content[:80]!r}") from None
    except jsonschema.ValidationError as error:
        raise _Again(f"the answer violates the schema: {error.message[:120]}") from None
    return answer
