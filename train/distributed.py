"""Ranks of a torchrun job. Rank 0 drives: it samples, decides and tells the others what to compute.

The others wait for commands, so no rank can enter a collective that another one skips. A rank that fails exits non-zero
and torchrun stops the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from game_registry import GameError
from pipeline.files import InputError, ServerError, run_cli, sole_writer

# Ranks wait while rank 0 samples; a dead rank 0 is noticed by torchrun, not by this limit.
WAIT = datetime.timedelta(hours=12)

T = TypeVar("T")


class PeerLost(ServerError):
    """Another rank is gone. Its own message has the cause; this one only says why we stop too."""


@contextlib.contextmanager
def with_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo and NCCL raise
        me, reason = os.environ.get("RANK", "0"), str(error).partition("\n")[0]
        raise PeerLost(f"rank {me} lost another rank, whose message says why ({reason})") from None


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """An input fault that all ranks of a host see alike is told by the first of them only; all exit with 2."""
    try:
        yield
    except (InputError, GameError):
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            raise SystemExit(2) from None
        raise


@contextlib.contextmanager
def held_folder(folder: str | Path) -> Iterator[None]:
    """``sole_writer`` of torchrun's first rank, which writes for all."""
    with sole_writer(folder) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
        yield


def run_ranks(main: Callable[[], int | None]) -> None:
    """``run_cli`` for a command that may be one rank of several.

    After a fault such a rank ends without the interpreter's orderly exit: threads that gloo keeps for a peer which is
    gone abort there now and then, and the exit code would be that of the abort.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        run_cli(main)
    code: Any = 1
    try:
        run_cli(main)
    except SystemExit as end:
        code = end.code
    except BaseException:  # whatever it is, the interpreter would only print it
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if code:
        os._exit(code)
    raise SystemExit(0)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among its peers. ``control`` carries Python objects over the CPU."""

    rank: int = 0
    world: int = 1
    control: Any = None

    @property
    def driver(self) -> bool:
        return self.rank == 0

    def broadcast(self, message: Any = None) -> Any:
        """``message`` of rank 0 on every rank."""
        if self.world == 1:
            return message
        box = [message]
        with with_peers():
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            with with_peers():
                dist.all_reduce(tensor)
        return tensor

    def mine(self, items: Sequence[T]) -> list[T]:
        """This rank's share: every ``world``-th, from its own number on."""
        return list(items[self.rank :: self.world])

    def agree(self, value: float, what: str) -> None:
        """All ranks hold the same ``value``.

        Raises:
            InputError: they do not.
        """
        values = self._everyones(value)
        if len(set(values)) > 1:
            raise InputError(
                f"ranks disagree on {what}: {values}; start all of them with the same arguments and files"
            )

    def least(self, value: int) -> int:
        """The smallest ``value`` over ranks."""
        return min(self._everyones(value))

    def _everyones(self, value: T) -> list[T]:
        """What each rank gave, by rank."""
        values = [value] * self.world
        if self.world > 1:
            with with_peers():
                dist.all_gather_object(values, value, group=self.control)
        return values

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(device: str = "auto") -> tuple[Ranks, str]:
    """Join the torchrun job when there is one. Returns the ranks and this rank's device."""
    use_cuda = torch.cuda.is_available() and device in ("auto", "cuda")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks(), ("cuda" if use_cuda else "cpu") if device == "auto" else device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if use_cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=WAIT)
    control = dist.new_group(backend="gloo", timeout=WAIT)
    return Ranks(dist.get_rank(), world, control), f"cuda:{local}" if use_cuda else "cpu"
