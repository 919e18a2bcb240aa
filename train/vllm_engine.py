"""Sampling through any number of stock vLLM servers (0.22-0.33): the engine of real runs.

    vllm serve MODEL --enable-lora --max-loras 2 --max-lora-rank 32 --enable-prefix-caching
    VLLM_BASE_URLS=http://a:8000,http://b:8000 python -m train ...

Token ids in, token ids and log-probs out (``/v1/completions``); an adapter is a model name; no server is patched.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from game_registry import AgentError
from pipeline.files import InputError, ServerError, resolved
from train.engine import Sample, SamplingParams
from train.vllm_pool import OncePerKey, PoolTimes, RefusedRequest, Server, ServerLost, ServerPool, TransientFault
from train.vllm_protocol import (
    FORCE,
    NonsenseAnswer,
    ServedModels,
    biased_request,
    completion_request,
    count_engines,
    fitted,
    magnified,
    of_others,
    own_name,
    parse_base_urls,
    read_biased,
    read_models,
    read_sample,
    server_path,
    without_bias,
)

MAX_TRIES = 5  # per turn, beside re-dispatch from servers that died
MAX_TIMEOUTS = 2  # a request that ran into its deadline twice is not tried a third time
LOAD_S = 120.0  # of an adapter; a turn may take longer
TAKE_BACK_S = 10.0  # for each of the two requests after a load that failed or was cancelled: somebody may wait
LORA_REMEDY = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
FIRST_BIAS = 4.0  # nats; enough for most tokens that were sampled, and nothing is magnified much
SURE_BIAS = 3.0  # above what a token needs to be sampled
MAX_MAGNIFIED = 100.0  # fp32 log-probs are good to some 4e-6, so what is read is good to 4e-4
MAX_BIASES = 16


class VllmEngine:
    """``Engine`` over HTTP.

    Args:
        base_urls: comma list of server URLs, ``/v1`` optional.
        model: the served name of the base model; its folder is accepted too when the server lists it as root. Empty:
            the only one there.
        stop_token_ids: what ends a turn (``ChatCodec.stop_token_ids``).

    LoRA folders are read by the server process: on several hosts they must lie on a disk that all of them see.
    """

    def __init__(
        self,
        base_urls: str,
        model: str,
        stop_token_ids: Sequence[int],
        *,
        api_key: str | None = None,
        times: PoolTimes | None = None,
    ) -> None:
        self.model = model
        self.stop_token_ids = tuple(stop_token_ids)
        self.exact_logprobs = True  # False: the caller does not use log-probs, so any temperature will do
        self.max_model_len: int | None = None
        self.n_sampled_tokens = 0
        self.n_retries = 0
        self.pool = ServerPool(parse_base_urls(base_urls), api_key=api_key, times=times, on_return=self._restore)
        self._adapters: dict[str, str] = {}
        self._served_adapters: set[str] = set()
        self._reloads, self._loaded_at = OncePerKey(), dict[tuple[int, str], float]()  # by server and adapter
        self._salts: dict[str | None, str] = {None: secrets.token_hex(8)}
        self._busy: collections.Counter[str | None] = collections.Counter()
        self._idle = asyncio.Condition()
        self._start_lock = asyncio.Lock()
        self._models: ServedModels | None = None

    # ------------------------------------------------------------------ start

    async def start(self) -> ServedModels:
        """Ask every server what it serves; dead ones are dropped, a wrong model is an error.

        Raises:
            ServerError: no server answers.
            InputError: the model is not served, or the API key is refused.
        """
        async with self._start_lock:
            if self._models is not None:
                return self._models
            answers = await asyncio.gather(*(self._served(s) for s in self.pool.servers))
            served = [a for a in answers if a is not None]
            if not served:
                reasons = "; ".join(f"{s.url}: {s.why_dead}" for s in self.pool.servers)
                raise ServerError(f"no vLLM server answers ({reasons}); start it, or correct its URL")
            names = {self._base_name(models) for models in served}
            if len(names) > 1:
                raise InputError(f"the servers serve different models ({', '.join(sorted(names))}); use one base model")
            self.model = names.pop()
            lengths = [m.max_model_len for m in served if m.max_model_len is not None]
            self.max_model_len = min(lengths) if lengths else None
            self._models = served[0]
            return self._models

    async def _served(self, server: Server) -> ServedModels | None:
        try:
            return read_models(await self.pool.request_retrying(server, "GET", "/v1/models", timeout_s=30.0))
        except RefusedRequest as error:
            remedy = "set VLLM_API_KEY" if error.status in (401, 403) else "expected an OpenAI-style server there"
            raise InputError(f"{error.detail}; {remedy}") from None
        except (TransientFault, NonsenseAnswer) as error:
            self.pool.drop(server, str(error))
        except ServerLost:
            pass
        return None

    def _base_name(self, models: ServedModels) -> str:
        if self.model in models.base:
            return self.model
        for name, root in zip(models.base, models.roots, strict=True):
            if self.model == root or (Path(self.model).is_dir() and Path(self.model).resolve() == server_path(root)):
                return name
        if not self.model and len(models.base) == 1:
            return models.base[0]
        known = ", ".join(models.base)
        raise InputError(f"model {self.model!r} is not served; the server has {known}: use that for --model")

    # ------------------------------------------------------------------ Engine

    async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
        """One turn. See ``train.engine.Engine``; a prompt that fills the server's context is ``AgentError("context")``.

        Raises:
            InputError: temperature other than 0 and 1 on a server that reports raw log-probs.
        """
        await self._ensure_started()
        if adapter is not None and adapter not in self._adapters and adapter not in self._served_adapters:
            raise AgentError("server", f"adapter {adapter!r} is not loaded; loaded: {sorted(self._adapters) or 'none'}")
        params = fitted(params, len(prompt_ids), self.max_model_len)
        salt = self._salts[adapter]
        body = completion_request(self.model, prompt_ids, params, self.stop_token_ids, salt)
        with self._in_flight(adapter):
            return await self._sample(body, params, adapter, salt)

    async def _ensure_started(self) -> None:
        if self._models is not None:
            return
        try:
            await self.start()
        except ServerError as error:
            raise AgentError("server", str(error)) from None

    async def _sample(self, body: dict[str, Any], params: SamplingParams, adapter: str | None, salt: str) -> Sample:
        prompt_ids: list[int] = body["prompt"]
        failed: Server | None = None
        tries = timeouts = 0
        while True:
            server = await self.pool.choose(prompt_ids, salt, avoid=failed)
            try:
                await self._check_logprobs(server, prompt_ids, params.temperature)
                body["model"], sent = self._name_on(server, adapter), time.monotonic()
                payload = await self.pool.request(server, "POST", "/v1/completions", body)
                sample = read_sample(payload, prompt_ids, params, self.stop_token_ids)
                self.n_sampled_tokens += len(sample.token_ids)
                return sample
            except ServerLost:
                failed = server
                continue
            except RefusedRequest as error:
                if not await self._reload_forgotten(server, adapter, error, sent) or tries >= MAX_TRIES:
                    raise AgentError("server", error.detail) from None
                kind, detail = "server", error.detail
            except TransientFault as error:
                kind, detail = error.kind, error.detail
            except NonsenseAnswer as error:
                if not error.retry:
                    raise AgentError("nonsense", f"{server.url}: {error}") from None
                kind, detail = "nonsense", f"{server.url}: {error}"
            tries, timeouts, failed = tries + 1, timeouts + (kind == "timeout"), server
            if tries >= MAX_TRIES or timeouts >= MAX_TIMEOUTS:
                raise AgentError(kind, f"{detail} ({tries} tries)")
            self.n_retries += 1
            if kind != "timeout":
                await asyncio.sleep(self.pool.times.backoff_s * 2 ** (tries - 1))

    def _name_on(self, server: Server, adapter: str | None) -> str:
        """What to ask ``server`` for."""
        return self.model if adapter is None else server.adapters.get(adapter, adapter)

    async def _reload_forgotten(self, server: Server, adapter: str | None, error: RefusedRequest, sent: float) -> bool:
        """A server that was restarted between two probes answers 404 for our adapter: load it again there, once for
        all turns that were ``sent`` before."""
        if error.status != 404 or adapter is None or adapter not in self._adapters:
            return False
        key, folder = (server.index, adapter), self._adapters[adapter]
        if self._loaded_at.get(key, 0.0) <= sent:
            server.processed_logprobs = None  # of the server that it was before
            with contextlib.suppress(TransientFault, ServerLost):
                await self._reloads.do(key, lambda: self._load_on(server, adapter, folder))
        return True

    async def close(self) -> None:
        await self.pool.close()

    # ------------------------------------------------------------------ log-probs at the sampling temperature

    async def _check_logprobs(self, server: Server, prompt_ids: Sequence[int], temperature: float) -> None:
        """At temperature 1 and for greedy decoding raw log-probs are right; else the server must scale them."""
        if temperature in (0.0, 1.0) or not self.exact_logprobs:
            return
        if not await self._processes_logprobs(server, self.model, prompt_ids, self._salts[None]):
            raise InputError(
                f"{server.url}: log-probs are those of temperature 1, asked for {temperature:g}; start the server with "
                "--logprobs-mode processed_logprobs, or use --temperature 1.0"
            )

    async def _processes_logprobs(self, server: Server, model: str, prompt_ids: Sequence[int], salt: str) -> bool:
        """Are the server's log-probs those of the processed logits? Asked once, until it is known to be another.

        The second most probable token has at most 1/2, unless the bias that makes it certain counts.

        Raises:
            InputError: it takes no ``logit_bias``.
            NonsenseAnswer: it ignores it.
        """
        if server.processed_logprobs is None:
            try:
                first, _ = await self._biased(server, model, prompt_ids, {}, salt)
                second, _ = await self._biased(server, model, prompt_ids, {first: -FORCE}, salt)
                if second == first:
                    raise NonsenseAnswer("logit_bias, with which log-probs are checked, is ignored; use stock vLLM")
                found = await self._force(server, model, prompt_ids, second, salt)
            except RefusedRequest as error:
                if "logit_bias" not in error.detail:
                    raise
                raise InputError(f"{error.detail}; log-probs are checked with it: start the server otherwise") from None
            server.processed_logprobs = found > math.log(0.5) / 2.0
        return server.processed_logprobs

    # ------------------------------------------------------------------ adapters

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a PEFT folder on every live server; dead ones get it when they return.

        Raises:
            InputError: no such folder, a name in use, run-time LoRA off, a rank too high, a data-parallel server.
            ServerError: no server took it.
        """
        path = resolved(folder, "adapter")
        if not (path / "adapter_config.json").is_file():
            raise InputError(f"adapter {folder}: expected a PEFT folder with adapter_config.json")
        if name in self._adapters or name == self.model:
            raise InputError(f"adapter name {name!r} is in use; use a new name (<capability>@v<k>) for new weights")
        await self.start()
        self._adapters[name] = str(path)
        self._salts[name] = secrets.token_hex(8)
        try:
            live = self.pool.alive
            await asyncio.gather(*(self._refuse_data_parallel(s) for s in live))
            loads = (self._load_or_drop(s, name, str(path)) for s in live)
            results = await asyncio.gather(*loads, return_exceptions=True)  # all end before the first fault is raised
            for fault in results:
                if isinstance(fault, BaseException):
                    raise fault
            if not any(results):
                raise ServerError(f"adapter {name}: no server is alive to take it; start one and run this again")
        except BaseException:  # a cancelled load arrives there as well
            self._adapters.pop(name, None)
            await asyncio.gather(*(self._take_back(s, name, str(path)) for s in self.pool.alive))
            raise

    async def use_served_adapter(self, name: str) -> None:
        """Sample with an adapter that the servers were started with (``--lora-modules``); it is never unloaded.

        Raises:
            InputError: a live server does not list it.
        """
        await self.start()
        for server in self.pool.alive:
            models = await self._served(server)
            if models is not None and name not in models.adapters:
                known = ", ".join(models.adapters) or "none"
                raise InputError(f"adapter {name!r}: neither a path nor served by {server.url} (served: {known})")
        self._served_adapters.add(name)
        self._salts[name] = secrets.token_hex(8)

    async def _load_or_drop(self, server: Server, name: str, folder: str) -> bool:
        try:
            await self._load_on(server, name, folder)
        except ServerLost:
            return False
        except TransientFault as error:
            self.pool.drop(server, error.detail)
            return False
        return True

    async def _load_on(self, server: Server, name: str, folder: str) -> None:
        """Load it as ``name``, or as ``own_name`` where another run has that name."""
        self.pool.note(server, "load", adapter=name)
        there = name
        try:
            await self._post_load(server, there, folder)
        except RefusedRequest as error:
            if error.status == 400 and "already been loaded" in error.detail:
                there = await self._load_anew(server, name, folder)
            elif error.status in (404, 405) and "adapter" not in error.detail.replace("load_lora_adapter", "").lower():
                raise InputError(f"{error.detail}; {LORA_REMEDY}") from None
            else:
                remedy = f"{folder} must be readable by the server and its rank allowed there"
                raise InputError(f"{error.detail}; {remedy}") from None
        except TransientFault as error:
            if "rank" in error.detail or "LoRA" in error.detail:  # vLLM answers 500 to an adapter that it cannot use
                remedy = "check --max-lora-rank of the server and the adapter's targets"
                raise InputError(f"{error.detail}; {remedy}") from None
            raise
        server.adapters[name], self._loaded_at[server.index, name] = there, time.monotonic()
        self.pool.note(server, "loaded", adapter=name)

    async def _load_anew(self, server: Server, name: str, folder: str) -> str:
        """The name is there. A try of ours that broke off loaded it, or this run before it was killed: its weights may
        be others. Or it is another run's, which may be sampling from it. Returns the name that ours has there."""
        loaded = await self._loaded(server)
        there = own_name(name, folder) if of_others(loaded, name, folder) else name
        if there in loaded:
            await self._post_unload(server, there)
        try:
            await self._post_load(server, there, folder)
        except RefusedRequest as error:
            raise InputError(f"{error.detail}; restart the server, or unload that adapter there") from None
        return there

    async def _take_back(self, server: Server, name: str, folder: str) -> None:
        """After a load that failed or was cancelled: ours goes where it arrived or still may, another run's stays."""
        there = server.adapters.pop(name, None)
        if there is None:
            with contextlib.suppress(TransientFault, ServerLost):
                loaded = await self._loaded(server, TAKE_BACK_S, tries=1)
                there = own_name(name, folder) if of_others(loaded, name, folder) else name
        if there is not None:
            await self._post_unload(server, there, TAKE_BACK_S)

    async def _loaded(self, server: Server, timeout_s: float = 30.0, tries: int = 3) -> Mapping[str, str]:
        """The adapters of whomever on a server, name -> folder.

        Raises:
            TransientFault, ServerLost: it does not tell.
        """
        try:
            payload = await self.pool.request_retrying(server, "GET", "/v1/models", tries=tries, timeout_s=timeout_s)
            return read_models(payload).adapters
        except NonsenseAnswer as error:
            raise TransientFault("nonsense", f"{server.url}: {error}") from None
        except RefusedRequest as error:
            raise TransientFault("server", error.detail) from None

    async def _post_load(self, server: Server, name: str, folder: str) -> None:
        limit = min(LOAD_S, self.pool.times.request_s)
        path, body = "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}
        await self.pool.request_retrying(server, "POST", path, body, timeout_s=limit, late_again=False)

    async def _post_unload(self, server: Server, there: str, timeout_s: float = 30.0) -> None:
        self.pool.note(server, "unload", adapter=there, in_flight=self._busy[there])
        with contextlib.suppress(RefusedRequest, TransientFault, ServerLost):  # an unknown name is what we want anyway
            await self.pool.request(server, "POST", "/v1/unload_lora_adapter", {"lora_name": there}, timeout_s)

    async def unload_adapter(self, name: str) -> None:
        """Forget ``name`` now for new turns, and on the servers once its turns in flight are done."""
        if self._adapters.pop(name, None) is None:
            return
        with contextlib.suppress(TimeoutError):  # no turn outlives its own deadline, so neither does the wait
            async with asyncio.timeout(self.pool.times.request_s), self._idle:
                await self._idle.wait_for(lambda: self._busy[name] == 0)
        self._busy.pop(name, None)
        self._salts.pop(name, None)
        names = [(s, s.adapters.pop(name)) for s in self.pool.alive if name in s.adapters]
        await asyncio.gather(*(self._post_unload(server, there) for server, there in names))

    async def _restore(self, server: Server) -> None:
        """A server is back: it must serve our model and know every adapter before it gets work."""
        self._base_name(read_models(await self.pool.request(server, "GET", "/v1/models", None, 30.0)))
        for name, folder in list(self._adapters.items()):
            await self._load_on(server, name, folder)

    async def _refuse_data_parallel(self, server: Server) -> None:
        try:
            engines = count_engines(str(await self.pool.request(server, "GET", "/metrics", None, 30.0)))
        except (RefusedRequest, TransientFault, ServerLost):
            return  # no metrics there: the canary after the delivery still sees a replica without the adapter
        if engines is not None and engines > 1:
            raise InputError(
                f"{server.url} runs {engines} data-parallel engines behind one URL, where a run-time adapter reaches "
                "only some of them; start one server per replica and list all of them in VLLM_BASE_URLS"
            )

    # ------------------------------------------------------------------ scoring

    async def score(
        self, server: Server, token_ids: Sequence[int], positions: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        """Log-probs (temperature 1) of ``token_ids[i]`` for i in ``positions`` on one server, with a cache of its own.

        Every position is a request of its own that is made to sample this token. One request for the log-probs of the
        whole prompt would say the same, but beside turns, of whomever, it kills a LoRA server: in vLLM 0.22-0.32 the
        LoRA kernel of the logits takes the sampled rows of the whole batch for rows of the prompt, and reads and writes
        outside of the prompt's logits where the batch has more of them.

        Raises:
            ServerError: the server fails; InputError: it does not know the adapter.
        """
        model, salt = self._name_on(server, adapter), secrets.token_hex(8)
        self.pool.note(server, "check", adapter=adapter)
        try:
            longest = max(positions)  # first, so that the others find their prompts computed
            processed = await self._processes_logprobs(server, model, token_ids[:longest], salt)
            read = self._force_lightly if processed else self._force
            found = {longest: await read(server, model, token_ids[:longest], token_ids[longest], salt)}
            rest = [i for i in positions if i != longest]
            scores = await asyncio.gather(*(read(server, model, token_ids[:i], token_ids[i], salt) for i in rest))
            found |= dict(zip(rest, scores, strict=True))
            return [found[i] for i in positions]
        except RefusedRequest as error:
            raise InputError(
                f"{error.detail}; {server.url} forgot adapter {adapter!r}: "
                "run one API process per URL (--api-server-count 1)"
            ) from None
        except (TransientFault, ServerLost, NonsenseAnswer) as error:
            raise ServerError(f"{server.url}: cannot score a sequence ({error})") from None

    async def _force(self, server: Server, model: str, prompt_ids: Sequence[int], token: int, salt: str) -> float:
        """What the server reports for ``token`` when nothing else can be sampled."""
        sampled, logprob = await self._biased(server, model, prompt_ids, {token: FORCE}, salt)
        if sampled != token:
            raise NonsenseAnswer(f"logit_bias of {FORCE:g} on token {token}: {server.url} sampled {sampled}")
        return logprob

    async def _force_lightly(
        self, server: Server, model: str, prompt_ids: Sequence[int], token: int, salt: str
    ) -> float:
        """The log-prob of ``token`` from a server that reports it with the bias: the bias is taken off again.

        With too little of it another token is sampled, with too much of it the log-prob is 0 in fp32.
        """
        low, high, bias = 0.0, FORCE, FIRST_BIAS
        for _ in range(MAX_BIASES):
            sampled, found = await self._biased(server, model, prompt_ids, {token: bias}, salt)
            if sampled != token:
                if bias == FORCE:
                    break
                low, bias = bias, min(2.0 * bias, (bias + high) / 2.0 if high < FORCE else FORCE)
                continue
            logprob = without_bias(found, bias)
            if magnified(logprob, bias) <= MAX_MAGNIFIED:
                return logprob
            high = bias
            guess = SURE_BIAS - logprob
            bias = guess if found < 0.0 and low < guess < high else (low + high) / 2.0
        raise NonsenseAnswer(f"logit_bias on token {token}: no bias up to {FORCE:g} tells its log-prob on {server.url}")

    async def _biased(
        self, server: Server, model: str, prompt_ids: Sequence[int], biases: Mapping[int, float], salt: str
    ) -> tuple[int, float]:
        prompt = list(prompt_ids)
        body = biased_request(model, prompt, biases, salt)
        return read_biased(await self.pool.request_retrying(server, "POST", "/v1/completions", body), prompt)

    # ------------------------------------------------------------------ counting

    @contextlib.contextmanager
    def _in_flight(self, adapter: str | None) -> Iterator[None]:
        self._busy[adapter] += 1
        try:
            yield
        finally:
            self._busy[adapter] -= 1
            if adapter is not None and self._busy[adapter] == 0 and adapter not in self._adapters:
                self._wake = asyncio.ensure_future(self._notify_idle())

    async def _notify_idle(self) -> None:
        async with self._idle:
            self._idle.notify_all()
