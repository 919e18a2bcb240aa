"""One progress line for commands that run many episodes: counts, rates, truncation share, speed, time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from train.episode import Episode

SUCCESS = 1.0 - 1e-9  # a reward of 1 up to rounding


class EpisodeMeter:
    """Counts episodes and writes the line to ``stream``: in place on a terminal, else every ``every_s`` seconds.

    Args:
        total: episodes of the whole job; ``done`` of them were there before.
    """

    def __init__(
        self, label: str, total: int, done: int = 0, stream: TextIO | None = None, every_s: float | None = None
    ) -> None:
        self.label, self.total, self.before = label, total, done
        self.stream = stream if stream is not None else sys.stderr
        self.terminal = self.stream.isatty()
        self.every_s = every_s if every_s is not None else (0.5 if self.terminal else 10.0)
        self.begin = self._last = time.monotonic()
        self.n = self.scored = self.successes = self.truncated = self.turns = self.invalid = self.tokens = 0
        self.reward = 0.0
        self.errors: dict[str, int] = {}

    def add(self, episode: Episode) -> None:
        """Count one finished episode."""
        result = episode.result
        self.n += 1
        if episode.scored:
            self.scored += 1
            self.reward += episode.reward
            self.successes += episode.reward >= SUCCESS
        else:
            kind = result.finish_reason
            self.errors[kind] = self.errors.get(kind, 0) + 1
        self.truncated += result.truncated_turns > 0 or result.finish_reason == "context"
        self.turns += result.turns
        self.invalid += result.invalid_calls
        self.tokens += episode.n_action_tokens
        if time.monotonic() - self._last >= self.every_s:
            self.write()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def line(self) -> str:
        """The progress line."""
        done, elapsed = self.before + self.n, max(self.seconds, 1e-9)
        parts = [f"{self.label}: {done}/{self.total} episodes"]
        if self.scored:
            parts.append(f"reward {self.reward / self.scored:.3f}")
            parts.append(f"success {100 * self.successes / self.scored:.1f}%")
        if self.n:
            parts.append(f"truncated {100 * self.truncated / self.n:.1f}%")
            parts.append(f"invalid calls {self.invalid / max(1, self.turns):.2f}/turn")
            errors = " ".join(f"{kind} {n}" for kind, n in sorted(self.errors.items())) or "0"
            parts.append(f"errors {errors}")
            parts.append(f"{self.tokens / elapsed:.0f} tokens/s")
            left = elapsed / self.n * (self.total - done)
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left" if done < self.total else f"{elapsed:.0f} s")
        return " | ".join(parts)

    def write(self, *, last: bool = False) -> None:
        """Write the line now."""
        self._last = time.monotonic()
        if self.terminal:
            self.stream.write(f"\r\033[K{self.line()}" + ("\n" if last else ""))
        else:
            self.stream.write(self.line() + "\n")
        self.stream.flush()
