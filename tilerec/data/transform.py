"""Transforms of dense features."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def signed_log(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return sign(x) log(1 + |x|), float32, any shape: compresses counts with long tails and keeps 0 and the sign.

    For x >= 0 it is the log(1 + x) of the DLRM paper (Naumov et al., 2019). `signed_log([0, e - 1, -1])` is about
    `[0, 1, -0.693]`.
    """
    exact = np.asarray(values, np.float64)
    return (np.sign(exact) * np.log1p(np.abs(exact))).astype(np.float32)
