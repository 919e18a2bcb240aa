"""A small OpenAI-style server with scripted answers, for tests that must not start a real one.

It runs in a thread of its own, so asynchronous tests, synchronous tests and subprocesses can all talk to it::

    with ScriptedServer(completion=lambda ids, body: [42, 2]) as server:
        ...  # server.url; server.requests holds what arrived
        server.fail = "500"   # refuse | 500 | 503 | hang | garbage | die_midway | None

It behaves as vLLM does in what the project relies on: token ids in and out, LoRA by name, biased log-probs, metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from aiohttp import web

from pipeline.ports import free_port

Body = dict[str, Any]
Completion = Callable[[list[int], Body], list[int]]
Chat = Callable[[list[dict[str, Any]], Body], dict[str, Any] | str]

STOP = 2  # end of turn of the model under test
SECOND = 3  # what comes where the stop token may not


@dataclasses.dataclass
class ScriptedServer:
    """See the module text.

    Args:
        completion: prompt ids and request body -> sampled ids. Default: the stop token alone.
        chat: messages and request body -> content, or a whole assistant message. Default: "ok".
        prompt_logprob: (ids, model name) -> the log-prob of each token, for canaries.
        processed_logprobs: a log-prob of a token with a ``logit_bias`` is the one with it.
        logprob: (token, body) -> log-prob of a sampled token.
        edit: last word on a completion response, to make it wrong in a chosen way.
        fail_paths: only these paths fail when ``fail`` is set.
        fail_times: how many requests fail before ``fail`` clears itself; None = for ever.
        delay_s: wait before a completion is answered.
        engines: data-parallel engines that ``/metrics`` shows.
        refuse_bias: answers a ``logit_bias`` with 400, as with speculative decoding.
    """

    completion: Completion = lambda ids, body: [STOP]
    chat: Chat = lambda messages, body: "ok"
    prompt_logprob: Callable[[list[int], str], list[float]] = lambda ids, model: [-1.0] * len(ids)
    processed_logprobs: bool = False
    logprob: Callable[[int, Body], float] = lambda token, body: -0.5
    edit: Callable[[dict[str, Any]], Any] = lambda response: response
    model: str = "scripted"
    max_model_len: int = 2048
    api_key: str | None = None
    port: int = dataclasses.field(default_factory=free_port)
    fail: str | None = None
    fail_paths: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")
    fail_times: int | None = None
    delay_s: float = 0.0
    refuse_chat: Callable[[list[Body]], bool] = lambda messages: False  # which conversations leave no room
    engines: int = 1
    lora_enabled: bool = True
    refuse_bias: bool = False
    requests: list[tuple[str, Body]] = dataclasses.field(default_factory=list)
    adapters: dict[str, str] = dataclasses.field(default_factory=dict)
    in_flight: int = 0
    max_in_flight: int = 0

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def calls(self, path: str) -> list[Body]:
        """Bodies of the requests that reached ``path``, in order."""
        return [body for seen, body in self.requests if seen == path]

    # ------------------------------------------------------------------ life cycle

    def __enter__(self) -> ScriptedServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen on ``port``; also brings a stopped server back (its adapters are gone, as after a real restart)."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10), "scripted server did not start"

    def stop(self) -> None:
        """Close the port and break every open connection."""
        if self._loop is None or self._stopping is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        self._loop = self._stopping = self._thread = None
        self.adapters.clear()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        self._stopping = stopping
        app = web.Application(middlewares=[self._fault], client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        ready.set()
        await stopping.wait()
        await runner.cleanup()

    # ------------------------------------------------------------------ failure modes

    @web.middleware
    async def _fault(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.requests.append((request.path, body))
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        if self.fail is None or request.path not in self.fail_paths:
            return await handler(request)  # type: ignore[no-any-return]
        mode = self.fail
        if self.fail_times is not None:
            self.fail_times -= 1
            if self.fail_times <= 0:
                self.fail = self.fail_times = None
        return await self._fail(request, mode)

    async def _fail(self, request: web.Request, mode: str) -> web.StreamResponse:
        if mode in ("500", "503"):
            return web.json_response({"error": {"message": "scripted failure"}}, status=int(mode))
        if mode == "hang":
            await asyncio.sleep(3600)
        if mode == "garbage":
            return web.Response(text='{"choices": [{"tok', content_type="application/json")
        if mode == "die_midway":
            response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
        if mode in ("refuse", "die_midway"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        raise AssertionError(f"unknown failure mode {mode!r}")

    # ------------------------------------------------------------------ endpoints

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        running = float(self.in_flight)
        labels = [f'{{engine="{i}",model_name="{self.model}"}}' for i in range(self.engines)]
        rows = [f"vllm:num_requests_running{label} {running}" for label in labels]
        return web.Response(text="\n".join(rows) + "\n")

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": self.model, "root": self.model, "parent": None, "max_model_len": self.max_model_len}
        loras = [{"id": name, "root": path, "parent": self.model} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": [base, *loras]})

    def _unknown_model(self, body: Body) -> web.Response | None:
        if body.get("model") in (self.model, *self.adapters):
            return None
        message = f"The model `{body.get('model')}` does not exist."
        return web.json_response({"error": {"message": message, "code": 404}}, status=404)

    @contextlib.contextmanager
    def _counted(self) -> Any:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1

    def _biased(self, prompt: list[int], body: Body) -> tuple[int, float] | None:
        """The token with a ``logit_bias`` and what is reported for it, when it is sampled: one other token, the stop
        token, has the rest of the probability. fp32, as on a server."""
        for name, bias in (body.get("logit_bias") or {}).items():
            if bias < 0:  # held down
                return SECOND + (int(name) == SECOND), -1.5
            most = math.log(0.5) if int(name) == SECOND else 0.0
            raw = np.float32(min(most, self.prompt_logprob([*prompt, int(name)], body["model"])[len(prompt)]))
            ours, other = raw + np.float32(bias), np.float32(np.log(-np.expm1(raw)) if raw < 0 else -200.0)
            if ours > other:
                processed = ours - np.logaddexp(ours, other)
                return int(name), float(min(np.float32(0.0), processed) if self.processed_logprobs else raw)
        return None

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()  # read once by aiohttp, then kept
        if (refusal := self._unknown_model(body)) is not None:
            return refusal
        if not 0 <= body.get("temperature", 1.0) <= 2:
            return web.json_response({"error": {"message": "temperature must be in [0, 2]"}}, status=400)
        if self.refuse_bias and "logit_bias" in body:
            said = "logit_bias is not supported with speculative decoding"
            return web.json_response({"error": {"message": said}}, status=400)
        with self._counted():
            await asyncio.sleep(self.delay_s)
            prompt, limit = body["prompt"], body["max_tokens"]
            forced = self._biased(prompt, body)
            ids = [forced[0]] if forced else self.completion(prompt, body)
            stops = body.get("stop_token_ids", [STOP])
            cut = len(ids) > limit or (len(ids) == limit and ids[-1] not in stops)
            ids = ids[:limit]
        logprobs = [forced[1]] if forced else [self.logprob(i, body) for i in ids]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "finish_reason": "length" if cut else "stop",
            "prompt_token_ids": prompt,
            "token_ids": ids,
            "logprobs": {
                "token_logprobs": logprobs,
                "tokens": [f"token_id:{i}" for i in ids],
                "top_logprobs": [{f"token_id:{i}": p} for i, p in zip(ids, logprobs, strict=True)],
            },
        }
        answer = {"id": f"cmpl-{time.time_ns()}", "model": body["model"], "choices": [choice]}
        return web.json_response(self.edit(answer))

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()  # read once by aiohttp, then kept
        if self.refuse_chat(body["messages"]):
            said = f"This model's maximum context length is {self.max_model_len} tokens; your request has more."
            return web.json_response({"error": {"message": said, "code": 400}}, status=400)
        with self._counted():
            await asyncio.sleep(self.delay_s)
            answer = self.chat(body["messages"], body)
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        choice = {"index": 0, "finish_reason": message.pop("finish_reason", "stop"), "message": message}
        return web.json_response(self.edit({"id": "chat", "model": body.get("model"), "choices": [choice]}))

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()  # read once by aiohttp, then kept
        if not self.lora_enabled:
            return web.json_response({"detail": "Not Found"}, status=404)
        if body["lora_name"] in self.adapters and not body.get("load_inplace"):
            message = f"The lora adapter '{body['lora_name']}' has already been loaded."
            return web.json_response({"error": {"message": message}}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return web.json_response({"error": {"message": f"The lora adapter '{name}' cannot be found."}}, status=404)
        return web.Response(text="Success")
