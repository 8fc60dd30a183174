"""`ScratchMemory`: how a load divides the memory that it may take beside the tensors of the job.

8 MiB of the budget stay free: allocators and threads take 2 to 6. Of the rest:

half       blocks of a file that wait for their checksums, and blocks of which a part is needed
an eighth  two buffers for rows of which a box holds a part, or that are copied to a device
an eighth  numbers of changed rows, in incremental checkpoints
a quarter  copies that a device makes, temporary tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BLOCK, MOST_CHECKS
from tilerec.errors import ConfigError

DEFAULT_BUDGET = 1 << 26
_FREE = 1 << 23
LEAST_BUDGET = _FREE + 4 * BLOCK  # a checksum covers a whole block
_LARGEST_BUFFER = 1 << 22  # a larger one reads no faster
_LARGEST_NUMBERS = 1 << 26  # 8 million rows


class ScratchMemory(NamedTuple):
    """Parts of a memory budget.

    Args:
        checks: number of blocks that wait for their checksums.
        buffer: bytes of a buffer; two exist at a time.
        numbers: bytes of row numbers.
    """

    checks: int
    buffer: int
    numbers: int

    @staticmethod
    def of(budget: int) -> ScratchMemory:
        """Return the parts of a budget in bytes.

        Raises:
            ConfigError: it is less than `LEAST_BUDGET`.
        """
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < LEAST_BUDGET:
            raise ConfigError(
                f"memory_budget: got {budget!r}; expected a whole number of bytes, at least {LEAST_BUDGET:,}. Raise it."
            )
        rest = budget - _FREE
        return ScratchMemory(
            min(MOST_CHECKS, rest // 2 // BLOCK - 1), min(_LARGEST_BUFFER, rest // 16), min(_LARGEST_NUMBERS, rest // 8)
        )


def scratch_tensor(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without values on the CPU, of at least one cell.

    Its memory is numpy's: glibc does not reuse the freed memory of torch's aligned allocations. With them, loads grew
    by 40 MB where 14 MB of buffers existed (2 ranks, buffers of 2 MB).
    """
    memory = np.empty(prod(sizes) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(tuple(sizes))
