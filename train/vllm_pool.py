"""Many stock servers as one: least-loaded dispatch, health probes, dropping dead servers and taking them back.

A server that refuses connections or stops answering ``/health`` is dropped at once: its requests in flight are
cancelled here and go to the others. It comes back when it is healthy again and has every adapter of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any

import aiohttp

from game_registry import AgentError
from pipeline.files import InputError
from train.prefix_routing import PrefixIndex, pick_server
from train.vllm_protocol import NonsenseAnswer, error_message

CONNECT_TIMEOUT_S = 10.0
HISTORY = 4  # changes of adapters that are told when a server dies
# uvicorn closes idle connections after 5 s; a client that keeps them longer writes into closed ones now and then.
KEEPALIVE_S = 4.0


@dataclasses.dataclass(frozen=True)
class PoolTimes:
    """Seconds. ``patience_s``: how long requests wait while every server is dead, from the death of the last one on."""

    request_s: float = 600.0
    probe_every_s: float = 5.0
    probe_timeout_s: float = 10.0
    patience_s: float = 30.0
    backoff_s: float = 0.5


def times_from_env(environ: Mapping[str, str]) -> PoolTimes:
    """``VLLM_TIMEOUT_S`` as the deadline of one request.

    Raises:
        InputError: not a positive number.
    """
    text = environ.get("VLLM_TIMEOUT_S", "").strip()
    if not text:
        return PoolTimes()
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"VLLM_TIMEOUT_S={text!r}: expected seconds > 0, for example 600")
    return PoolTimes(request_s=seconds)


class OncePerKey:
    """Work that many ask for and one does: who asks while it goes on waits for the same."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    async def do(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """``work()``, which goes on for the others when one who waits is cancelled."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(work())
            self._tasks[key].add_done_callback(lambda _: self._tasks.pop(key, None))
        await asyncio.shield(self._tasks[key])


class TransientFault(RuntimeError):
    """This request failed and another try may not. ``kind``: the AgentError kind when no try is left."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


class ServerLost(RuntimeError):
    """The server was dropped while the request was in flight; it goes to another one."""


class RefusedRequest(RuntimeError):
    """HTTP 4xx: the same request will be refused again."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


@dataclasses.dataclass(eq=False)
class Server:
    """One base URL.

    Args:
        adapters: what is loaded there, our name -> the name that it has there.
        history: the last changes of adapters, (monotonic time, what).
    """

    index: int
    url: str
    alive: bool = True
    missed_probes: int = 0
    why_dead: str = ""
    in_flight: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)
    adapters: dict[str, str] = dataclasses.field(default_factory=dict)
    processed_logprobs: bool | None = None
    n_answered: int = 0
    history: list[tuple[float, str]] = dataclasses.field(default_factory=list)

    def doing(self) -> str:
        """What was going on there: turns in flight and the last changes of adapters."""
        now = time.monotonic()
        changes = ", ".join(f"{what} {now - when:.1f} s before" for when, what in self.history)
        return f"{len(self.in_flight)} requests in flight" + (f"; {changes}" if changes else "")


class ServerPool:
    """HTTP to a list of servers, with deadlines on every wait.

    Args:
        urls: base URLs without ``/v1``.
        on_return: called before a dead server is taken back (to load the adapters); a fault there keeps it out.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        times: PoolTimes | None = None,
        on_return: Callable[[Server], Awaitable[None]] | None = None,
    ) -> None:
        self.servers = [Server(i, url) for i, url in enumerate(urls)]
        self.times = times or PoolTimes()
        self.prefixes = PrefixIndex()
        self.n_deaths = 0
        self.n_redispatched = 0
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._on_return = on_return
        self._session: aiohttp.ClientSession | None = None
        self._prober: asyncio.Task[None] | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self._dead_since: float | None = None
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None  # deaths, returns, changes of adapters

    def note(self, server: Server, what: str, **fields: Any) -> None:
        """Record a change of adapters on ``server``: the last ones are told when it dies."""
        server.history.append((time.monotonic(), f"{what} {fields.get('adapter', '')}".strip()))
        del server.history[:-HISTORY]
        self.on_event({"event": what, "server": server.url, **fields})

    @property
    def alive(self) -> list[Server]:
        return [s for s in self.servers if s.alive]

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No connection limit: as many episodes in flight as the caller wants; servers queue by themselves.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=300)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
            self._prober = asyncio.create_task(self._probe_forever())
        return self._session

    async def close(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._prober
        if self._session is not None:
            await self._session.close()
        self._session = self._prober = None

    # ------------------------------------------------------------------ choosing

    async def choose(self, prompt_ids: Sequence[int], salt: str, avoid: Server | None = None) -> Server:
        """A live server for this prompt; ``avoid`` only when there is no other.

        Raises:
            AgentError: kind ``server``; every server is dead and stayed so for ``patience_s``.
        """
        self.session()
        while not (live := self.alive):
            await self._wait_for_return()
        if len(live) == 1:
            return live[0]
        candidates = [s for s in live if s is not avoid]
        depths = self.prefixes.depth(prompt_ids, salt, len(self.servers))
        server = self.servers[pick_server({s.index: len(s.in_flight) for s in candidates}, depths)]
        self.prefixes.record(prompt_ids, salt, server.index)
        return server

    async def _wait_for_return(self) -> None:
        since = self._dead_since if self._dead_since is not None else time.monotonic()
        left = since + self.times.patience_s - time.monotonic()
        self._changed.clear()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
                return
        reasons = "; ".join(f"{s.url}: {s.why_dead}" for s in self.servers)
        raise AgentError("server", f"no server answers ({reasons}); start it again, then run the same command to go on")

    # ------------------------------------------------------------------ requests

    async def request(
        self, server: Server, method: str, path: str, body: Any = None, timeout_s: float | None = None
    ) -> Any:
        """One HTTP request, read as JSON (or text when it is none and the path is no completion).

        Raises:
            TransientFault: time-out, broken connection, 429 or 5xx, cut JSON.
            ServerLost: the server was dropped meanwhile.
            RefusedRequest: any other 4xx.
        """
        task = asyncio.ensure_future(self._request(server, method, path, body, timeout_s or self.times.request_s))
        server.in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # the caller itself was cancelled
                raise
            raise ServerLost(server.why_dead) from None
        finally:
            server.in_flight.discard(task)

    async def _request(self, server: Server, method: str, path: str, body: Any, timeout_s: float) -> Any:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self.session().request(method, server.url + path, data=data, timeout=limits) as response:
                text = await response.text()
                status = response.status
        except TimeoutError:
            raise TransientFault("timeout", f"{server.url}{path}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, UnicodeDecodeError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) or not await self.healthy(server):
                self.drop(server, f"{type(error).__name__} on {path}")
                raise ServerLost(server.why_dead) from None
            raise TransientFault("server", f"{server.url}{path}: {type(error).__name__}: {error}") from None
        if status == 429 or status >= 500:
            raise TransientFault("server", f"{server.url}{path}: {error_message(status, text)}")
        if status >= 400:
            raise RefusedRequest(status, f"{server.url}{path}: {error_message(status, text)}")
        server.n_answered += 1
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            if path == "/v1/completions":
                detail = f"{server.url}{path}: the answer is not JSON ({text[:60]!r})"
                raise TransientFault("nonsense", detail) from None
            return text

    async def request_retrying(
        self,
        server: Server,
        method: str,
        path: str,
        body: Any = None,
        *,
        tries: int = 3,
        timeout_s: float | None = None,
        late_again: bool = True,
    ) -> Any:
        """``request`` on one server, transient faults tried again after a pause; answers that are late, too, if
        ``late_again``. ``NonsenseAnswer`` is the caller's."""
        for attempt in range(tries):
            try:
                return await self.request(server, method, path, body, timeout_s)
            except TransientFault as fault:
                if attempt == tries - 1 or (fault.kind == "timeout" and not late_again):
                    raise
                await asyncio.sleep(self.times.backoff_s * 2**attempt)
        raise NonsenseAnswer("tries must be >= 1")

    # ------------------------------------------------------------------ health

    def drop(self, server: Server, why: str) -> None:
        """Take a server out: no new requests, those in flight are cancelled and re-dispatched by their callers."""
        if not server.alive:
            return
        server.alive, server.why_dead, server.processed_logprobs = False, f"{why}; {server.doing()}", None
        self.on_event({"event": "server lost", "server": server.url, "why": server.why_dead})
        server.history.clear()
        server.adapters.clear()
        self.prefixes.forget(server.index)
        self.n_deaths += 1
        if not self.alive:
            self._dead_since = time.monotonic()
        me = asyncio.current_task()
        for task in list(server.in_flight):
            if task is not me:
                self.n_redispatched += 1
                task.cancel()

    async def healthy(self, server: Server) -> bool:
        """Does it answer ``/health`` now?"""
        limits = aiohttp.ClientTimeout(total=self.times.probe_timeout_s)
        try:
            async with self.session().get(server.url + "/health", timeout=limits) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(self.times.probe_every_s)
            await asyncio.gather(*(self.probe(s) for s in self.servers))

    async def probe(self, server: Server) -> None:
        """Three missed probes in a row drop a live server; one good probe takes a dead one back."""
        if await self.healthy(server):
            server.missed_probes = 0
            if not server.alive:
                await self._take_back(server)
            return
        server.missed_probes += 1
        if server.missed_probes >= 3:
            self.drop(server, "does not answer /health")

    async def _take_back(self, server: Server) -> None:
        try:
            if self._on_return is not None:
                await self._on_return(server)
        except (TransientFault, ServerLost, RefusedRequest, NonsenseAnswer, InputError) as error:
            server.why_dead = f"healthy again, but {error}"
            return
        server.alive = True
        self.on_event({"event": "server back", "server": server.url})
        self._dead_since = None
        self._changed.set()
