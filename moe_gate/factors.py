"""One low-rank update of one weight."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class LoraFactors:
    """One adapted weight: W' = W + scaling * B @ A.

    Shapes: a linear has ``A [r, in]``, ``B [out, r]``; fused experts have ``A [E, r, in]``, ``B [E, out, r]``.
    """

    A: Tensor
    B: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return int(self.A.shape[-2])
