"""Names of the merges, apart from ``train.merge`` so that a command line needs no torch."""

from __future__ import annotations

from typing import Literal

MergeMethod = Literal["linear", "ties", "dare_linear", "dare_ties"]
METHODS: tuple[MergeMethod, ...] = ("linear", "ties", "dare_linear", "dare_ties")
DENSITY = 0.2  # of entries kept; the published TIES setting
