"""Which server has computed the beginning of a prompt: a small index of prompt blocks, for prefix caches.

A turn of an episode starts with the whole episode so far, and the episodes of a group start with one prompt. Sending
both to the server that has those keys and values saves their prefill; load comes first, though.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

BLOCK = 64  # tokens; vLLM's own blocks are 16, coarser ones make the index cheap and lose under 64 tokens of prefill
MAX_BLOCKS = 200_000


class PrefixIndex:
    """Chained hashes of prompt blocks -> the servers (by number) that were sent them; the oldest go first."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._owners: OrderedDict[int, int] = OrderedDict()  # hash -> bit mask of servers
        self._max_blocks = max_blocks

    def __len__(self) -> int:
        return len(self._owners)

    def _hashes(self, prompt_ids: Sequence[int], salt: str) -> list[int]:
        chain, hashes = hash(salt), []
        for start in range(0, len(prompt_ids) - BLOCK + 1, BLOCK):
            chain = hash((chain, tuple(prompt_ids[start : start + BLOCK])))
            hashes.append(chain)
        return hashes

    def depth(self, prompt_ids: Sequence[int], salt: str, n_servers: int) -> list[int]:
        """Leading tokens of the prompt that each server has seen, in steps of ``BLOCK``."""
        depths = [0] * n_servers
        alive = (1 << n_servers) - 1
        for position, key in enumerate(self._hashes(prompt_ids, salt), 1):
            alive &= self._owners.get(key, 0)
            if not alive:
                break
            for server in range(n_servers):
                if alive >> server & 1:
                    depths[server] = position * BLOCK
        return depths

    def record(self, prompt_ids: Sequence[int], salt: str, server: int) -> None:
        """Note that ``server`` was sent this prompt."""
        for key in self._hashes(prompt_ids, salt):
            self._owners[key] = self._owners.get(key, 0) | 1 << server
            self._owners.move_to_end(key)
        while len(self._owners) > self._max_blocks:
            self._owners.popitem(last=False)

    def forget(self, server: int) -> None:
        """A server lost its cache (it died)."""
        keep = ~(1 << server)
        for key, mask in list(self._owners.items()):
            if mask & keep:
                self._owners[key] = mask & keep
            else:
                del self._owners[key]


def pick_server(loads: Mapping[int, int], depths: Sequence[int]) -> int:
    """The server for a request: the longest known prefix among those whose load is close to the least one.

    Close: at most ``8 + least / 4`` requests more, so a group of 16 can stay together but no server starves.
    """
    least = min(loads.values())
    slack = 8 + least // 4
    return min((s for s in loads if loads[s] <= least + slack), key=lambda s: (-depths[s], loads[s], s))
