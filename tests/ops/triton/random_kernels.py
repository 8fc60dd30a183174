"""The random ops' Triton kernels as functions of the ops' arguments."""

from __future__ import annotations

from tilerec.ops.random.triton import backend, renew
from tilerec.ops.runtime.library import LIBRARY

_KERNELS = LIBRARY.taking_arguments({**backend.KERNELS, **renew.KERNELS})
random_fill_ = _KERNELS["random_fill_"]
random_rows_ = _KERNELS["random_rows_"]
renew_rows_ = _KERNELS["renew_rows_"]
