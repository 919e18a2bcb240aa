"""What the commands of stages 1 and 2 share: one-line usage errors, natural order, number types, a progress line."""

from __future__ import annotations

import argparse
import re
import sys
import time
from fractions import Fraction
from typing import NoReturn

from pipeline.files import InputError


class Parser(argparse.ArgumentParser):
    """``argparse`` whose ``--help`` shows defaults and whose errors are one line on stderr with exit code 2."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=(description or "").strip(), formatter_class=_HelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def rational(text: str) -> Fraction:
    """``"0.20"`` or ``"1/5"`` as the exact number that was written: 0.20 is 1/5, not the nearest binary float.

    Raises:
        InputError: not a finite number, or one of an absurd length: ``Fraction`` would write out every digit.
    """
    exponent = text.strip().lower().partition("e")[2].lstrip("+-0_")
    try:
        if len(text) > 100 or len(exponent) > 3:
            raise ValueError
        return Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise InputError(f"expected a number such as 0.20 or 1/5, found {text!r:.40}") from None


def rational_option(text: str) -> Fraction:
    """``rational`` as an argparse type."""
    try:
        return rational(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_int(text: str) -> int:
    """An argparse type: an integer >= 1."""
    return _integer(text, 1)


def non_negative_int(text: str) -> int:
    """An argparse type for seeds: an integer >= 0 (numpy takes no other)."""
    return _integer(text, 0)


def _integer(text: str, low: int) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > 15 or int(digits) < low:
        raise argparse.ArgumentTypeError(f"expected an integer >= {low} of at most 15 digits, found {text!r:.40}")
    return int(digits)


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key by which ``airline:2`` comes before ``airline:10``."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return tuple((0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts)


class ProgressLine:
    """``label 12/164 ...`` on stderr, at most twice a second; without a terminal only the end is shown."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._started = self._last = time.monotonic()

    def advance(self, n: int = 1, note: str = "") -> None:
        self.done += n
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._last > 0.5:
            self._last = now
            sys.stderr.write(f"\r\x1b[2K{self._text(now)} {note}")
            sys.stderr.flush()

    def close(self, note: str = "") -> None:
        start = "\r\x1b[2K" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}{self._text(time.monotonic())} {note}".rstrip() + "\n")

    def _text(self, now: float) -> str:
        share = f"{self.done}/{self.total}" if self.total is not None else str(self.done)
        elapsed = now - self._started
        left = ""
        if self.total and 0 < self.done < self.total:
            left = f", {elapsed / self.done * (self.total - self.done):.0f} s left"
        return f"{self.what} {share}, {elapsed:.0f} s{left}"
