"""Agreement between label runs: Fleiss' kappa over the three labels."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from pipeline.labels import ABSENT, LABELS, LabelSet


@dataclasses.dataclass(frozen=True)
class Agreement:
    """``kappa`` is None where it is undefined: fewer than two raters, or one label for everything."""

    kappa: float | None
    observed: float | None
    n_raters: int


def fleiss_kappa(table_IK: npt.NDArray[np.integer]) -> Agreement:
    """Fleiss' kappa (Fleiss 1971) of a table of votes: ids by categories, the same number of raters in each row::

    P_i = (sum_k n_ik^2 - n) / (n (n - 1)),   P_e = sum_k p_k^2,   kappa = (mean P_i - P_e) / (1 - P_e)
    """
    n = int(table_IK[0].sum()) if len(table_IK) else 0
    if n < 2:
        return Agreement(None, None, n)
    squares_I = (table_IK.astype(np.int64) ** 2).sum(axis=1)
    observed = float(((squares_I - n) / (n * (n - 1))).mean())
    shares_K = table_IK.sum(axis=0) / table_IK.sum()
    expected = float((shares_K**2).sum())
    kappa = None if expected >= 1 - 1e-12 else (observed - expected) / (1 - expected)
    return Agreement(kappa, observed, n)


def agreement(labels: LabelSet, capability: int) -> Agreement:
    """The agreement of all runs that label ``capability``."""
    codes_RI = labels.codes[:, capability, :]
    codes_RI = codes_RI[codes_RI[:, 0] != ABSENT]
    table_IK = np.stack([(codes_RI == code).sum(axis=0) for code in range(len(LABELS))], axis=1)
    return fleiss_kappa(table_IK)
