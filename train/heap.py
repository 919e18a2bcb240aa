"""A process that runs many episodes beside a large heap that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def standing_heap() -> Iterator[None]:
    """What exists now stays: the garbage collector passes over it inside the block.

    After the imports and the model some 400,000 objects exist that nobody will free. A full collection looks at all of
    them, 0.2 s in which no episode and no update goes on, and a thousand episodes cause two or three.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
