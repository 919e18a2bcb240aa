"""Messages to tokens, in one place. Sampled tokens stay verbatim; only new messages are tokenised, as a suffix.

A chat template is asked for two things: the prompt before the first turn, and the text between the end of an
assistant turn and the start of the next one. The second is rendered behind a fixed short conversation, so its cost
does not grow with the episode and a template that rewrites earlier turns (Qwen3 drops old reasoning) cannot change
what was sampled.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from game_registry import Message
from pipeline.files import InputError
from tool_calls import ToolSchema

KEPT_PROMPTS = 256  # the newest; groups begin one after the other
_MARK = "\u2042\u2042assistant\u2042\u2042"  # cannot occur in a template


class ChatCodec:
    """Tokenizer, chat template and stop tokens of one model.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        stop_token_ids: ids that end a turn. Taken from the model's config, since a tokenizer's own eos can be another
            token.
        template_kwargs: passed to the template, for example ``{"enable_thinking": False}``.

    Raises:
        InputError: no chat template, or the template ends assistant turns with a token that the model does not stop on.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int], template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(dict.fromkeys(int(i) for i in stop_token_ids))
        self.template_kwargs = template_kwargs or {}
        self._prompts: dict[bytes, array[int]] = {}
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "the tokenizer has no chat template; use an instruct model or add chat_template.jinja to its folder"
            )
        closing = self._between([])
        if not closing or closing[0] not in self.stop_token_ids:
            token = tokenizer.decode(closing[:1])
            raise InputError(
                f"the chat template ends a turn with {token!r}, which is not among the model's stop tokens "
                f"{[tokenizer.decode([i]) for i in self.stop_token_ids]}; fix eos_token_id in generation_config.json"
            )
        self.end_of_turn = closing[0]
        self.rewrites_history = self._rewrites_history()

    @classmethod
    def from_model(cls, folder: str, template_kwargs: dict[str, Any] | None = None) -> ChatCodec:
        """Load tokenizer and stop tokens of a model folder or hub name."""
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise InputError(
                f"model {folder}: cannot be loaded ({str(error).splitlines()[0]}); check --model"
            ) from None
        try:
            eos = GenerationConfig.from_pretrained(folder).eos_token_id
        except OSError:
            eos = None
        if eos is None:
            eos = getattr(config, "eos_token_id", None)
        if eos is None:
            eos = tokenizer.eos_token_id
        if eos is None:
            raise InputError(f"model {folder}: has no eos token; set eos_token_id in its generation_config.json")
        return cls(tokenizer, eos if isinstance(eos, list) else [eos], template_kwargs)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """Tokens of ``messages`` up to where the assistant's answer begins."""
        # the episodes of a group all begin with the same
        key = hashlib.blake2b(repr((messages, tools)).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        ids = self._prompts.get(key)
        if ids is None:
            ids = self._prompts[key] = array("q", self._encode(self._render(messages, tools, generate=True)))
            if len(self._prompts) > KEPT_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        return list(ids)

    def suffix_ids(self, new_messages: Sequence[Message], *, turn_closed: bool = True) -> list[int]:
        """Context tokens between a sampled turn and the next one: turn ending, ``new_messages``, start of the answer.

        Args:
            turn_closed: the sampled turn already holds its end-of-turn token (False after a cut turn: it is added, as
                context).
        """
        ids = self._between(new_messages)
        return ids[1:] if turn_closed else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a sampled turn, without its end-of-turn token."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _between(self, new_messages: Sequence[Message]) -> list[int]:
        conversation: list[Message] = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": _MARK},
            *new_messages,
        ]
        text = self._render(conversation, None, generate=bool(new_messages))
        _, found, tail = text.rpartition(_MARK)
        if not found:
            raise InputError(
                "the chat template does not print the content of assistant turns; it cannot be trained with"
            )
        return self._encode(tail)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, *, generate: bool) -> str:
        clean = [{k: v for k, v in m.items() if k != "raw_content"} for m in messages]
        for message in clean:
            if message.get("content") is None:
                message["content"] = ""
        return str(
            self.tokenizer.apply_chat_template(
                clean,
                tools=list(tools) if tools else None,
                add_generation_prompt=generate,
                tokenize=False,
                **self.template_kwargs,
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _rewrites_history(self) -> bool:
        """Does the template print earlier turns differently once the conversation goes on?"""
        turns: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"},
        ]
        first = self._render(turns, None, generate=False)
        longer = self._render([*turns, {"role": "user", "content": "d"}], None, generate=True)
        return not longer.startswith(first)
