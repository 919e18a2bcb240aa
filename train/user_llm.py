"""A user simulator for environments with ``needs_user_llm``: messages in, the user's next words out, over HTTP.

It is synchronous, since an environment's ``step`` is; the episode loop runs such a step in a thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from game_registry import AgentError, Message
from pipeline.files import InputError
from train.vllm_protocol import NonsenseAnswer, error_message, only_choice, parse_base_urls

TRIES = 4
BACKOFF_S = 0.5


@dataclasses.dataclass(frozen=True)
class UserLLM:
    """A chat model that plays the user.

    Args:
        url: OpenAI-style server, ``/v1`` optional.
        timeout_s: deadline of one answer.
    """

    url: str
    model: str
    temperature: float = 0.7
    max_tokens: int = 256
    api_key: str | None = None
    timeout_s: float = 120.0
    backoff_s: float = BACKOFF_S

    def __call__(self, messages: Sequence[Message]) -> str:
        """The user's next message.

        Raises:
            AgentError: kind ``server``, ``timeout`` or ``nonsense`` after ``TRIES`` tries; never an empty string.
        """
        fault = AgentError("server", "not tried")
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self.backoff_s * 2 ** (attempt - 1))
            try:
                return self._ask(messages)
            except AgentError as error:
                fault = error
                if error.kind == "refused":
                    break
        kind = "server" if fault.kind == "refused" else fault.kind
        raise AgentError(kind, f"user simulator: {fault.detail}")

    def _ask(self, messages: Sequence[Message]) -> str:
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                payload = json.loads(response.read())
            content = only_choice(payload).get("message", {}).get("content")
        except TimeoutError:
            raise AgentError("timeout", f"{self.url}: no answer within {self.timeout_s:g} s") from None
        except urllib.error.HTTPError as error:
            kind = "refused" if 400 <= error.code < 500 and error.code != 429 else "server"
            text = error.read().decode(errors="replace")
            raise AgentError(kind, f"{self.url}: {error_message(error.code, text)}") from None
        except (ValueError, NonsenseAnswer) as error:
            raise AgentError("nonsense", f"{self.url}: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise AgentError("server", f"{self.url}: {error}") from None
        if not isinstance(content, str) or not content.strip():
            raise AgentError("nonsense", f"{self.url}: the answer has no text")
        return content


def add_user_llm_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``user_llm_from``."""
    group = parser.add_argument_group("user simulator (environments that need one)")
    group.add_argument("--user-llm-url", help="OpenAI-style server, /v1 optional")
    group.add_argument("--user-llm-model", help="its model name")
    group.add_argument("--user-llm-temperature", type=float, default=0.7, help="[%(default)s]")
    group.add_argument("--user-llm-max-tokens", type=int, default=256, help="[%(default)s]")


def user_llm_from(args: argparse.Namespace, api_key: str | None = None) -> UserLLM | None:
    """The user simulator that the flags describe, or None.

    Raises:
        InputError: one of URL and model without the other.
    """
    if not args.user_llm_url and not args.user_llm_model:
        return None
    if not (args.user_llm_url and args.user_llm_model):
        raise InputError("a user simulator needs both --user-llm-url and --user-llm-model")
    url = parse_base_urls(args.user_llm_url)[0]
    return UserLLM(url, args.user_llm_model, args.user_llm_temperature, args.user_llm_max_tokens, api_key)
