"""Which engine a command uses, and the flags that say so. Shared by collect, evaluate and train.

Without a server (no ``--base-url``, no ``VLLM_BASE_URLS``) the model runs in this process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Literal

from game_registry import AgentError
from pipeline.files import InputError, ServerError
from train.chat import ChatCodec
from train.engine import Engine
from train.vllm_engine import VllmEngine
from train.vllm_pool import times_from_env

EngineKind = Literal["vllm", "local"]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What ``open_engine`` needs.

    Args:
        model: folder or hub name of the base model: tokenizer and, for the local engine, weights.
        served_model: name of the base model on the servers; default: ``model``.
        base_urls: comma list; empty for the local engine.
        dtype: local engine only; ``auto`` is bfloat16 where the hardware has it.
        max_rows: local engine only; sequences decoded together.
        template_kwargs: for the chat template, such as ``{"enable_thinking": False}``.
        any_model: without ``served_model`` take the only model that the servers have, whatever its name.
    """

    model: str
    kind: EngineKind = "local"
    served_model: str | None = None
    base_urls: str = ""
    api_key: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    max_rows: int = 128
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    any_model: bool = False


@dataclasses.dataclass(frozen=True)
class OpenEngine:
    """A ready engine, its codec, and the most tokens that one episode may have there (None = no limit known)."""

    engine: Engine
    codec: ChatCodec
    kind: EngineKind
    model: str
    max_model_len: int | None

    def fit(self, max_seq_length: int) -> int:
        """``max_seq_length`` cut to the model's context: a full context ends an episode, it does not fail it."""
        return max_seq_length if self.max_model_len is None else min(max_seq_length, self.max_model_len)

    @property
    def n_sampled_tokens(self) -> int:
        """Tokens sampled so far."""
        return int(getattr(self.engine, "n_sampled_tokens", 0))


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``engine_options``."""
    group = parser.add_argument_group("model and engine")
    group.add_argument("--model", default=os.environ.get("VLLM_MODEL"), help="folder or hub name [$VLLM_MODEL]")
    group.add_argument("--engine", choices=["vllm", "local"], help="[vllm when a server URL is given, else local]")
    group.add_argument("--base-url", help="server URLs, comma list, /v1 optional [$VLLM_BASE_URLS or $VLLM_BASE_URL]")
    group.add_argument("--tokenizer", help="folder or hub name of the tokenizer [--model]")
    group.add_argument("--dtype", default="auto", help="local engine: auto, bfloat16, float16 or float32 [%(default)s]")
    group.add_argument(
        "--max-rows", type=int, default=128, help="local engine: sequences decoded together [%(default)s]"
    )
    group.add_argument("--chat-template-kwargs", default="{}", metavar="JSON", help='e.g. {"enable_thinking": false}')


def engine_options(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> EngineOptions:
    """Flags first, then the environment.

    Raises:
        InputError: no model, an engine without its server, or flags that contradict each other.
    """
    if not args.model:
        raise InputError("no model given; set --model or VLLM_MODEL")
    urls = args.base_url or environ.get("VLLM_BASE_URLS") or environ.get("VLLM_BASE_URL") or ""
    kind: EngineKind = args.engine or ("vllm" if urls else "local")
    if kind == "vllm" and not urls:
        raise InputError("--engine vllm needs a server; set --base-url or VLLM_BASE_URLS")
    if args.engine == "local" and args.base_url:
        raise InputError("--engine local contradicts --base-url; drop one of them")
    if args.max_rows < 1:
        raise InputError(f"--max-rows: expected >= 1, found {args.max_rows}")
    try:
        template_kwargs = json.loads(args.chat_template_kwargs)
    except ValueError:
        template_kwargs = None
    if not isinstance(template_kwargs, dict):
        raise InputError(f"--chat-template-kwargs: expected a JSON object, found {args.chat_template_kwargs!r:.60}")
    return EngineOptions(
        model=args.model,
        kind=kind,
        served_model=environ.get("VLLM_MODEL") or None,
        base_urls=urls if kind == "vllm" else "",
        api_key=environ.get("VLLM_API_KEY") or None,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        max_rows=args.max_rows,
        template_kwargs=template_kwargs,
    )


async def open_engine(options: EngineOptions) -> OpenEngine:
    """Start the engine and check that it can work.

    Raises:
        InputError: the model cannot be loaded or is not served.
        ServerError: no server answers.
    """
    if options.kind == "vllm":
        return await _open_vllm(options)
    from train.local_engine import LocalEngine, load_model

    codec = ChatCodec.from_model(options.tokenizer or options.model, dict(options.template_kwargs))
    model = load_model(options.model, options.dtype)
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return OpenEngine(LocalEngine(model, codec, max_rows=options.max_rows), codec, "local", options.model, length)


async def _open_vllm(options: EngineOptions) -> OpenEngine:
    times = times_from_env(os.environ)
    name = options.served_model or ("" if options.any_model else options.model)
    engine = VllmEngine(options.base_urls, name, (), api_key=options.api_key, times=times)
    try:
        await engine.start()  # before the tokenizer is loaded: a dead server is told at once
        codec = ChatCodec.from_model(options.tokenizer or options.model, dict(options.template_kwargs))
    except (InputError, ServerError):
        await engine.close()
        raise
    engine.stop_token_ids = codec.stop_token_ids
    return OpenEngine(engine, codec, "vllm", engine.model, engine.max_model_len)


async def attach_adapter(opened: OpenEngine, name: str, folder: str | None) -> str:
    """Make an adapter usable and return the name to sample with: a PEFT folder is loaded, else the server must have it.

    Raises:
        InputError: the folder cannot be loaded, or the name is not served.
    """
    if folder is not None:
        await opened.engine.load_adapter(name, folder)
        return name
    if not isinstance(opened.engine, VllmEngine):
        raise InputError(f"adapter {name!r}: not found; expected a PEFT folder or a .safetensors file")
    await opened.engine.use_served_adapter(name)
    return name


def as_server_error(error: AgentError) -> ServerError:
    """An engine's fault as the fault of a command."""
    return ServerError(error.detail)
