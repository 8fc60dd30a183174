"""What is kept of a table of ids, and what the hash ops give back, as records.

Nouns as in `definition.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HashRange(NamedTuple):
    """The shape of a table, and where the part that is held begins; rows = buckets * slots."""

    buckets: int
    slots: int
    max_probe: int = 128
    first: int = 0


class HashState(NamedTuple):
    """What is kept of the buckets that are held, bucket after bucket. `expires_E` may be empty: nothing expires."""

    ids_E: Tensor  # int64
    used_E: Tensor  # bool
    since_E: Tensor  # int64, steps
    last_E: Tensor  # int64, steps
    hits_E: Tensor  # int64
    expires_E: Tensor  # int64, the caller's clock
    counters_BC: Tensor  # int32


class Found(NamedTuple):
    """See `zch_find`."""

    rows_N: Tensor
    probes_N: Tensor


class Assigned(NamedTuple):
    """See `zch_assign_`."""

    rows_N: Tensor
    outcomes_N: Tensor
    probes_N: Tensor
    evicted_rows_M: Tensor
    evicted_ids_M: Tensor


class AssignedEach(NamedTuple):
    """See `zch_assign_each_`. Where the outcome is EVICTED, entry n took row rows_N[n] of evicted_ids_N[n]."""

    rows_N: Tensor
    outcomes_N: Tensor
    probes_N: Tensor
    evicted_ids_N: Tensor


class Resized(NamedTuple):
    """A new state, and the new row of every old one (-1: it was not used, -2: its id was dropped)."""

    state: HashState
    moved_E: Tensor


def empty_state(
    held: int,
    slots: int,
    *,
    expires: bool = False,
    counters: int = 0,
    device: torch.device | str | None = None,
) -> HashState:
    """The state of `held` buckets without any id; `counters` per bucket are for admission."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    rows = held * slots
    return HashState(
        zeros(rows), zeros(rows, dtype=torch.bool), zeros(rows), zeros(rows), zeros(rows),
        zeros(rows if expires else 0), zeros(held, counters, dtype=torch.int32),
    )  # fmt: skip
