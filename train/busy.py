"""How busy the hardware is: seconds in which at least one of any number of overlapping activities goes on."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyClock:
    """``with clock:`` around every activity; of one event loop, from any number of its tasks.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._running = 0
        self._since = self._done = 0.0

    def __enter__(self) -> None:
        if self._running == 0:
            self._since = self._now()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if self._running == 0:
            self._done += self._now() - self._since

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        return self._done + (self._now() - self._since if self._running else 0.0)


class IdleMeter:
    """Shares of the wall time, from one reading to the next, in which sampler and trainer had nothing to do."""

    def __init__(self, sampler: BusyClock, trainer: BusyClock, now: Callable[[], float] = time.perf_counter) -> None:
        self._sampler, self._trainer, self._now = sampler, trainer, now
        self._mark = self._read()

    def _read(self) -> tuple[float, float, float]:
        return self._now(), self._sampler.seconds, self._trainer.seconds

    def shares(self) -> dict[str, float]:
        """``idle_share`` of the sampler and ``trainer_idle_share``, in [0, 1], since the last call."""
        before, self._mark = self._mark, self._read()
        wall = self._mark[0] - before[0]
        return {
            name: min(1.0, max(0.0, 1.0 - (self._mark[i] - before[i]) / wall)) if wall > 0 else 0.0
            for name, i in (("idle_share", 1), ("trainer_idle_share", 2))
        }
