"""Answers of an OpenAI-compatible chat endpoint that must be JSON of a given schema.

An answer that violates the schema is asked for again; it is never repaired.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jsonschema

from pipeline.endpoint import Again, Endpoint, EndpointClient


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


class ChatClient(EndpointClient):
    """A client for one endpoint; use it as an async context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.usage = Usage()

    async def ask(
        self, system: str, user: str, schema: dict[str, Any], *, max_tokens: int, temperature: float, seed: int
    ) -> Answer:
        """An answer that satisfies ``schema``. A retry uses the next seed.

        Raises:
            ServerError: all attempts failed, or one failed in a way that will not pass.
        """
        cost = Usage()

        async def attempt(index: int) -> Answer:
            body = self._body(system, user, schema, max_tokens, temperature, seed + index)
            return Answer(_checked(self._content(await self.post(body), cost), schema), cost)

        return await self.repeat(attempt)

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

    def _content(self, text: str, cost: Usage) -> str:
        """The message of a chat completion; its tokens are added to ``cost`` and to the client's total."""
        try:
            data = json.loads(text)
            choice = data["choices"][0]
            content = choice["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise Again(f"expected a chat completion, found {text[:80]!r}") from None
        usage = Usage.of(data.get("usage"))
        cost.add(usage)
        self.usage.add(usage)
        if choice.get("finish_reason") == "length":
            raise Again("the answer was cut at the token limit; raise --max-tokens")
        if not isinstance(content, str):
            raise Again(f"expected text, found {content!r:.60}")
        return content


def _checked(content: str, schema: dict[str, Any]) -> Any:
    try:
        answer = json.loads(content)
        jsonschema.validate(answer, schema)
    except (ValueError, RecursionError):
        raise Again(f"the answer is not JSON: {content[:80]!r}") from None
    except jsonschema.ValidationError as error:
        raise Again(f"the answer violates the schema: {error.message[:120]}") from None
    return answer
