"""Free text from an OpenAI-compatible chat endpoint: conversations in, text and finish reason out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from environment_calls import as_unicode
from game_registry import Agent, AgentError, Message, Reply, Turn
from pipeline.endpoint import Again, EndpointClient
from pipeline.files import ServerError

# vLLM's refusals (HTTP 400) of a conversation that leaves no room for an answer
_NO_ROOM = re.compile(r"HTTP 400: .*(maximum context length|max_(completion_)?tokens.{0,60}too large)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Completion:
    """``finish_reason`` is ``stop``, ``length``, or ``context`` when the conversation leaves no room for an answer:
    all of them the model's, none a fault of the server."""

    text: str
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How answers are drawn; recorded with every attempt."""

    temperature: float
    max_tokens: int


class TextClient(EndpointClient):
    """A client for one endpoint; use it as an async context manager."""

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

        async def attempt(_: int) -> Completion:
            return _read(await self.post(body))

        try:
            return await self.repeat(attempt)
        except ServerError as error:
            if _NO_ROOM.search(str(error)):
                return Completion("", "context")
            raise


def _read(text: str) -> Completion:
    try:
        choice = json.loads(text)["choices"][0]
        content = choice["message"]["content"]
        reason = choice.get("finish_reason") or "stop"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise Again(f"expected a chat completion, found {text[:80]!r}") from None
    if content is not None and not isinstance(content, str):
        raise Again(f"expected text, found {content!r:.60}")
    # a server that cuts an answer between two halves of a character sends one half; no file can hold that
    return Completion(as_unicode(content or ""), str(reason))


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
