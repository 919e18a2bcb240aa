"""Many episodes at once: independent, asynchronous, each with its own environment and deadline.

Used by collect and evaluate. No turn waits for another episode's turn; a slow or stuck one holds nobody up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from game_registry import Failed, Game, GameError, GameSpec
from pipeline.files import ServerError
from train.chat import ChatCodec
from train.engine import Engine
from train.episode import Episode, EpisodeParams, run_episode
from train.heap import standing_heap

ABORT_KINDS = ("server", "nonsense")  # the engine has retried; nothing that follows can be trusted to be better
MAX_TIMEOUTS_IN_A_ROW = 16
ENVIRONMENT_CALL_S = 30.0  # environments are plain Python without I/O; a call takes micro- to milliseconds


@dataclasses.dataclass(frozen=True)
class Job:
    """One episode to run. ``params`` overrides those of ``collect``, so one call can mix greedy and sampled ones."""

    seed: int
    sample_idx: int = 0
    hinted: bool = False
    adapter: str | None = None
    params: EpisodeParams | None = None


class StuckEnvironmentError(RuntimeError):
    """An environment's method did not return."""


class WatchedGame:
    """A game whose methods are interrupted when they do not return: no environment can stop the event loop for good.

    The interrupt is a timer signal, so it works in the main thread; elsewhere the methods are called as they are. Code
    that blocks all signals or loops in C is not covered.
    """

    def __init__(self, game: Game, limit_s: float = ENVIRONMENT_CALL_S) -> None:
        self._game = game
        self._limit_s = limit_s

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._game, name)
        if not callable(value):
            return value

        def watched(*args: Any) -> Any:
            with interrupted_after(self._limit_s, f"{name} did not return"):
                return value(*args)

        watched.__name__ = name
        return watched


class interrupted_after:  # a class, since contextlib.contextmanager costs three times as much per step
    """Raise ``StuckEnvironmentError`` in the block after ``limit_s`` seconds (main thread only, one at a time)."""

    def __init__(self, limit_s: float, what: str) -> None:
        self.limit_s, self.what = limit_s, what
        self.active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self.active:
            self.previous = signal.signal(signal.SIGALRM, self._fire)
            signal.setitimer(signal.ITIMER_REAL, self.limit_s)

    def __exit__(self, *_: object) -> None:
        if self.active:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self.previous)

    def _fire(self, signum: int, frame: FrameType | None) -> None:
        raise StuckEnvironmentError(f"{self.what} within {self.limit_s:g} s")


class EnvironmentPool:
    """Instances of one environment, made when needed and used again (``reset`` fixes everything)."""

    def __init__(self, spec: GameSpec, user_llm: Callable[..., str] | None = None) -> None:
        if spec.needs_user_llm and user_llm is None:
            raise GameError(f"game {spec.name} needs a user simulator; give --user-llm-url and --user-llm-model")
        self._spec, self._user_llm = spec, user_llm
        self._free: list[Game] = []

    def take(self) -> Game:
        """A free instance.

        Raises:
            GameError: ``make_env`` raises.
        """
        if self._free:
            return self._free.pop()
        options = {"user_llm": self._user_llm} if self._spec.needs_user_llm else {}
        try:
            game = self._spec.make_env(**options)
        except Exception as error:  # foreign code: whatever it raises is its fault and is named as such
            raise GameError(f"game {self._spec.name}: make_env raised {type(error).__name__}: {error}") from error
        return game if self._spec.needs_user_llm else WatchedGame(game)

    def give_back(self, game: Game) -> None:
        self._free.append(game)


async def collect(
    spec: GameSpec,
    engine: Engine,
    codec: ChatCodec,
    jobs: Iterable[Job],
    params: EpisodeParams,
    *,
    concurrency: int = 256,
    on_episode: Callable[[Job, Episode], None],
    user_llm: Callable[..., str] | None = None,
) -> None:
    """Run every job, at most ``concurrency`` at a time, in the order given; ``on_episode`` gets each as it ends.

    An episode that fails by its environment's fault or its deadline is handed over like any other (its outcome says
    so). One that fails by the server's fault is not: the work is incomplete, and running the rest would not help.

    Raises:
        ServerError: the engine gave up (dead servers, nonsense), or 16 episodes in a row ran into their deadlines.
        GameError: the environment cannot be made.
    """
    pool = EnvironmentPool(spec, user_llm)
    queue = iter(jobs)
    timeouts = 0

    async def work() -> None:
        nonlocal timeouts
        for job in queue:
            game = pool.take()
            episode = await run_episode(
                spec,
                game,
                engine,
                codec,
                job.seed,
                job.params or params,
                adapter=job.adapter,
                sample_idx=job.sample_idx,
                hinted=job.hinted,
            )
            outcome = episode.result.outcome
            if not isinstance(outcome, Failed):
                timeouts = 0
                pool.give_back(game)
            elif outcome.kind in ABORT_KINDS:
                raise ServerError(outcome.detail)
            else:  # the instance may be broken: the next job gets a fresh one
                timeouts += outcome.kind == "timeout"
                if timeouts >= MAX_TIMEOUTS_IN_A_ROW:
                    raise ServerError(f"{timeouts} episodes in a row ran into their deadline; last: {outcome.detail}")
            on_episode(job, episode)

    with standing_heap():
        await run_all(work() for _ in range(concurrency))


async def run_all(coroutines: Iterable[Any]) -> None:
    """Await all; the first exception cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def jobs_of_group(seed: int, num_samples: int, hint_ratio: float = 0.0, adapter: str | None = None) -> Iterator[Job]:
    """The samples of one seed; the first ``round(hint_ratio * num_samples)`` of them are hinted."""
    n_hinted = round(hint_ratio * num_samples)
    for index in range(num_samples):
        yield Job(seed, index, hinted=index < n_hinted, adapter=adapter)
