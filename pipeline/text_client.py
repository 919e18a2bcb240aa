"""Free text from an OpenAI-compatible chat endpoint: conversations in, text and finish reason out."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence

import aiohttp

from game_registry import Agent, AgentError, Message, Reply, Turn
from pipeline.chat_client import FIRST_PAUSE_S, LONGEST_PAUSE_S, RETRYABLE, Endpoint
from pipeline.files import ServerError


@dataclasses.dataclass(frozen=True)
class Completion:
    """``finish_reason`` is ``stop`` or ``length``: a cut answer is the model's, not a fault of the server."""

    text: str
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How answers are drawn; recorded with every attempt."""

    temperature: float
    max_tokens: int


class TextClient:
    """A client for one endpoint; use it as an async context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> TextClient:
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self.endpoint.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)  # the caller's concurrency is the limit
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(self, messages: Sequence[Message], sampling: Sampling, seed: int) -> Completion:
        """The next assistant message.

        Raises:
            ServerError: all attempts failed, or one failed in a way that will not pass.
        """
        body = {
            "model": self.endpoint.model,
            "messages": list(messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": seed,
        }
        pause, reason = FIRST_PAUSE_S, ""
        for attempt in range(self.endpoint.retries + 1):
            answer = await self._post(body)
            if isinstance(answer, Completion):
                return answer
            reason = answer
            if attempt < self.endpoint.retries:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
        raise ServerError(f"{self.endpoint.url}: {reason} ({self.endpoint.retries + 1} attempts); check the server")

    async def _post(self, body: dict[str, object]) -> Completion | str:
        """The answer, or why this attempt failed in a way that may pass."""
        assert self._session is not None, "use the client as an async context manager"
        try:
            async with self._session.post(self.endpoint.url, json=body) as response:
                text = await response.text(errors="replace")
                status = response.status
        except TimeoutError:
            return f"no answer within {self.endpoint.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"cannot be reached ({type(error).__name__}: {error})"
        if status == 200:
            return _read(text)
        detail = f"HTTP {status}: {' '.join(text.split())[:200]}"
        if status in RETRYABLE:
            return detail
        raise ServerError(f"{self.endpoint.url}: {detail}; check --model, the key and the limits")


def _read(text: str) -> Completion | str:
    try:
        choice = json.loads(text)["choices"][0]
        content = choice["message"]["content"]
        reason = choice.get("finish_reason") or "stop"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return f"expected a chat completion, found {text[:80]!r}"
    if content is not None and not isinstance(content, str):
        return f"expected text, found {content!r:.60}"
    return Completion(content or "", str(reason))


def text_agent(client: TextClient, sampling: Sampling, seed: int) -> Agent:
    """An agent of ``game_registry.play`` that asks the endpoint; it acts in text (tool calls are not offered).

    A dead server becomes ``AgentError("server")``, so its episode is no failed rollout.
    """

    async def agent(turn: Turn) -> Reply:
        messages = [{"role": m["role"], "content": m.get("content") or ""} for m in turn.messages]
        messages = [{**m, "role": "user"} if m["role"] == "tool" else m for m in messages]
        try:
            completion = await client.complete(messages, sampling, seed + turn.index)
        except ServerError as error:
            raise AgentError("server", str(error)) from None
        return Reply(text=completion.text, finish_reason=completion.finish_reason)

    return agent
