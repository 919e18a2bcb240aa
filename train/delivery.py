"""Adapter delivery: new weights reach every server under a new name, and a canary proves it.

A canary is a fixed token sequence whose log-probs the trainer computes with its new and its old weights. After a load,
the server's log-probs s of some of its tokens must lie nearer to the new ones n than to the old ones o:

    error_new = sqrt(mean (s - n)^2)     error_old = sqrt(mean (s - o)^2)     moved = sqrt(mean (n - o)^2)

Server and trainer differ by rounding even on equal weights (in bf16 by some hundredths of a nat per token), and one
small optimiser step moves the log-probs by less than that. The comparison is decided only when ``moved`` stands out of
the rounding; until then the old weights stay the reference, so steps add up and an adapter that never arrives is found
some steps later: a few, or ten where the policy is nearly certain of all tokens.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from pipeline.files import InputError, ServerError
from train.engine import Engine
from train.vllm_engine import VllmEngine
from train.vllm_pool import Server

KEEP_VERSIONS = 2  # the newest and the one before: a straggling episode of the old policy can still end its turn
RESOLVED_Z = 10.0  # standard errors between "new" and "old"; the verdict at half way is then five of them off
SCORED_TOKENS = 32  # of the canary; few, so that rounding alone is hardly ever taken for a move
ROUNDING_SHARE = 0.57  # of a token's move, at most; where nothing moved, rounding is 0.87 of the "move" that it makes
LEAST_TOKENS = 6.0  # effective number of tokens that moved
SURE_TOKENS = 96  # scored before a run is stopped, and in every fourth delivery in a row that decided nothing
MAX_ERROR = 0.5  # nats rms; no rounding does this, it is another model or another adapter


class DeliveryError(ServerError):
    """The server does not run the trainer's weights. The text has both errors."""


@dataclasses.dataclass(frozen=True)
class Canary:
    """A fixed sequence and the trainer's log-probs of ``token_ids[1:]`` at temperature 1 (fp32).

    Args:
        new_logprobs: with the weights that are being delivered.
        old_logprobs: with the weights of the last delivery (the base model before the first).
    """

    token_ids: tuple[int, ...]
    new_logprobs: tuple[float, ...]
    old_logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        n = len(self.token_ids) - 1
        if n < 1 or len(self.new_logprobs) != n or len(self.old_logprobs) != n:
            raise InputError(
                f"canary of {n + 1} tokens: expected {n} new and {n} old log-probs, "
                f"found {len(self.new_logprobs)} and {len(self.old_logprobs)}"
            )
        if not all(math.isfinite(x) for x in (*self.new_logprobs, *self.old_logprobs)):
            raise InputError("canary: the trainer's log-probs are not finite; its weights are broken")


@dataclasses.dataclass(frozen=True)
class CanaryResult:
    """Errors in nats (root mean square per token). ``alpha``: 0 = the old weights, 1 = the new ones. ``resolved``: they
    are far enough apart to decide."""

    error_new: float
    error_old: float
    moved: float
    resolved: bool
    alpha: float = math.nan

    @property
    def wrong(self) -> bool:
        """The server runs the old weights, or something else altogether."""
        return not self.error_new <= MAX_ERROR or (self.resolved and self.alpha <= 0.5)  # NaN is wrong too


@dataclasses.dataclass(frozen=True)
class DeliveryReport:
    """Seconds of one delivery, and the worst canary over the servers (None without a canary, on a local engine, or
    when no server lived to be judged)."""

    name: str
    seconds: float
    load_s: float
    canary: CanaryResult | None


def compare_canary(server: Sequence[float], new: Sequence[float], old: Sequence[float]) -> CanaryResult:
    """Which of two trainer log-prob vectors the server's is nearer to, and whether that can be told at all.

    With d = n - o, the server's position between the two is alpha = <w(s - o), wd> / <wd, wd> (0 = old, 1 = new). The
    weights w = min(1, median |d| / |d|) keep the tokens that moved most from being all of it: a sure policy is exact on
    most tokens, and the rounding of the few that it is not sure of would be a move with next to nothing off the line to
    tell it by. Tokens with d = 0 exactly, as certain now as before, are left out: where most are, the median would be
    0. With r = w(s - o) - alpha wd and h = (wd)^2 / <wd, wd>, alpha has the standard errors

        rms(r) / |wd|                        where rounding is alike on all tokens
        |wd r / (1 - h)| / <wd, wd>          where it differs between them (jackknife: HC3, MacKinnon and White 1985)

    Resolved when at least ``LEAST_TOKENS`` tokens count and both are at most ``1 / RESOLVED_Z`` and at most
    ``ROUNDING_SHARE / sqrt(tokens)``. The second bound is about single tokens: however many there are, they must not
    make a move of the trainer's own rounding, half way along which the server lies.
    """
    s, n, o = (np.asarray(x, dtype=np.float64) for x in (server, new, old))
    error_new = float(np.sqrt(np.mean((s - n) ** 2)))
    error_old = float(np.sqrt(np.mean((s - o) ** 2)))
    moved, kept = n - o, n != o
    size = np.abs(moved[kept])
    middle = float(np.median(size)) if size.size else 0.0
    weight = np.minimum(1.0, middle / np.maximum(size, np.finfo(float).tiny))
    d, at = weight * moved[kept], weight * (s - o)[kept]
    square = float(d @ d)
    alpha, resolved = math.nan, False
    if square > 0.0:
        share = d**2 / square
        alpha = float(at @ d) / square
        if 1.0 / (share @ share) >= LEAST_TOKENS:  # then no share is near 1
            residual = at - alpha * d
            alike = float(np.sqrt(np.mean(residual**2) / square))
            differing = float(np.linalg.norm(d * residual / (1.0 - share)) / square)
            resolved = max(alike, differing) <= min(1.0 / RESOLVED_Z, ROUNDING_SHARE / math.sqrt(d.size))
    return CanaryResult(error_new, error_old, float(np.sqrt(np.mean(moved**2))), resolved, alpha)


def spread_indices(length: int, count: int = SCORED_TOKENS) -> list[int]:
    """At most ``count`` indices below ``length``, evenly spread and always the same.

    Not those that moved most: the trainer's own rounding differs between new and old weights, and the largest
    differences are then those of rounding, between which the server's log-probs lie half way.
    """
    return sorted(set(np.linspace(0, length - 1, min(count, length)).round().astype(int).tolist()))


class AdapterDelivery:
    """Delivers versions of adapters to one engine, unloads old ones, and keeps the times.

    Names are ``<capability>@v<k>``: a new name for new weights, so no server mixes the caches of two versions.
    """

    def __init__(self, engine: Engine, keep_versions: int = KEEP_VERSIONS) -> None:
        self.engine = engine
        self.keep_versions = keep_versions
        self.reports: list[DeliveryReport] = []
        self._versions: dict[str, list[str]] = {}
        self._references: dict[str, tuple[float, ...]] = {}
        self._undecided: collections.Counter[str] = collections.Counter()  # deliveries in a row, by capability
        self._unloading: set[asyncio.Task[None]] = set()

    async def deliver(self, capability: str, version: int, folder: str, canary: Canary | None = None) -> DeliveryReport:
        """Load ``folder`` as ``<capability>@v<version>`` everywhere, check it, unload what is no longer needed.

        Raises:
            DeliveryError: a server's log-probs are nearer to the old weights.
            InputError, ServerError: see ``VllmEngine.load_adapter``.
        """
        name = adapter_name(capability, version)
        begin = time.perf_counter()
        await self.engine.load_adapter(name, folder)
        versions = self._versions.setdefault(capability, [])
        versions.append(name)  # before the check: ``close`` takes a version that failed it off the servers too
        loaded = time.perf_counter()
        result = None
        if canary is not None and isinstance(self.engine, VllmEngine):
            result = await self._check(self.engine, capability, name, canary)
        report = DeliveryReport(name, time.perf_counter() - begin, loaded - begin, result)
        self.reports.append(report)
        while len(versions) > self.keep_versions:
            task = asyncio.create_task(self.engine.unload_adapter(versions.pop(0)))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)
        return report

    async def rehearse(self, capability: str, version: int, folder: str) -> None:
        """Have every server take ``folder`` as a version that nobody samples from, and forget it.

        Raises:
            InputError: a server is healthy and takes no adapter: LoRA off, a rank above its limit, targets that it does
                not know, a folder that it does not see. Or the version is in use.
            ServerError: no server is alive.
        """
        name = adapter_name(capability, version)
        before = self.engine.pool.alive if isinstance(self.engine, VllmEngine) else []
        try:
            await self.engine.load_adapter(name, folder)
        except ServerError:
            await self._refuse_unable(before)
            raise
        try:
            await self._refuse_unable(before)
        finally:
            await self.engine.unload_adapter(name)

    async def _refuse_unable(self, servers: Sequence[Server]) -> None:
        """Name a server that was dropped at a load and lives: it would be dropped again at every delivery, while one
        that died loads what it lacks when it returns."""
        for server in servers:
            if not server.alive and isinstance(self.engine, VllmEngine) and await self.engine.pool.healthy(server):
                raise InputError(f"{server.url} does not load adapters ({server.why_dead}); its log says why")

    async def _check(self, engine: VllmEngine, capability: str, name: str, canary: Canary) -> CanaryResult | None:
        """The worst result over the servers; None when none of them lived to be judged."""
        reference = self._references.get(capability, canary.old_logprobs)
        if len(reference) != len(canary.new_logprobs):  # the caller changed its sequence
            reference = canary.old_logprobs
        tokens = SURE_TOKENS if self._undecided[capability] % 4 == 3 else SCORED_TOKENS
        results = await self._compare(engine, name, canary, reference, engine.pool.alive, tokens)
        if doubtful := [server for server, result in results if result.wrong]:
            # some tokens can be nearer to the old weights by chance; a run is stopped by many
            again = dict(await self._compare(engine, name, canary, reference, doubtful, SURE_TOKENS))
            # one that died before the second look has no verdict: it loads the adapter anew when it returns
            results = [(s, again.get(s, first)) for s, first in results if s in again or not first.wrong]
        for server, result in results:
            if result.wrong:
                raise DeliveryError(
                    f"{server.url} does not run {name}: its log-probs differ from the trainer's new weights by "
                    f"{result.error_new:.4f} and from the old ones by {result.error_old:.4f} nats rms; "
                    "check that the server reads the adapter folder of this run, then --resume"
                )
        if not results:
            return None
        worst = max((result for _, result in results), key=lambda r: (not r.resolved, r.error_new))
        resolved = all(result.resolved for _, result in results)
        self._references[capability] = canary.new_logprobs if resolved else reference
        self._undecided[capability] = 0 if resolved else self._undecided[capability] + 1
        return worst

    async def _compare(
        self, engine: VllmEngine, name: str, canary: Canary, reference: Sequence[float], servers: Sequence[Server],
        tokens: int,
    ) -> list[tuple[Server, CanaryResult]]:  # fmt: skip
        """Each of ``servers`` that lives, judged by at most ``tokens`` tokens."""
        chosen = spread_indices(len(reference), tokens)
        new, old = ([vector[i] for i in chosen] for vector in (canary.new_logprobs, reference))
        scores = await asyncio.gather(
            *(engine.score(server, canary.token_ids, [i + 1 for i in chosen], name) for server in servers),
            return_exceptions=True,
        )
        for server, score in zip(servers, scores, strict=True):
            # a server that died meanwhile loads the adapter when it returns; any other fault is one of this delivery
            if isinstance(score, BaseException) and (server.alive or not engine.pool.alive):
                raise score
        judged = [(s, score) for s, score in zip(servers, scores, strict=True) if not isinstance(score, BaseException)]
        return [(server, compare_canary(score, new, old)) for server, score in judged]

    async def close(self) -> None:
        """Unload every version that is still loaded (a server that died meanwhile is no fault)."""
        names = [name for versions in self._versions.values() for name in versions]
        self._versions.clear()
        with contextlib.suppress(ServerError, InputError):
            await asyncio.gather(*self._unloading, *(self.engine.unload_adapter(name) for name in names))


def adapter_name(capability: str, version: int) -> str:
    """``<capability>@v<version>``."""
    return f"{capability}@v{version}"
