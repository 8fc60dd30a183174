"""Records of the hash ops: the state of a table, calls and results. Terms as in `definition.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.ops.hash.policy import Policy


def _number_or_tensor(number: int | Tensor) -> tuple[Tensor | None, int]:
    """Return a tensor and 0, or None and the number."""
    return (number, 0) if isinstance(number, Tensor) else (None, number)


class HashRange(NamedTuple):
    """Shape of a table, and the first bucket of the held part; rows = buckets * slots."""

    buckets: int
    slots: int
    max_probe: int = 128
    first: int = 0


class HashState(NamedTuple):
    """State of the held buckets, bucket after bucket. If `expires_E` is empty, no id expires."""

    ids_E: Tensor  # int64
    used_E: Tensor  # bool
    since_E: Tensor  # int64, steps
    last_E: Tensor  # int64, steps
    hits_E: Tensor  # int64
    expires_E: Tensor  # int64, the caller's clock
    counters_BC: Tensor  # int32


class AssignOptions(NamedTuple):
    """Options of `zch_assign_`.

    Args:
        step: of training; `since` and `last` are steps. Rows used in a step are not evicted in it. Steps must not
            decrease. A number, or a tensor (int64, no dimension) on the ids' device: a CUDA graph reads it at each
            replay.
        policy, exponent: which row is evicted first; the exponent is that of `Policy.DISTANCE_LFU`.
        now: the clock of expiry; a number, or a tensor as `step`.
        ttl: the time an id lives after its last use; a number, or int64 [N].
        evict: ids with a full window evict in steps that this number divides. In other steps, and with 0, they are
            rejected.
        threshold: occurrences an id needs before it gets a row; above 1 the state needs counters.
        counts_N: int64, number of occurrences per id. may_insert_N: bool, False only looks the id up.
    """

    step: int | Tensor
    policy: int = Policy.LRU
    exponent: float = 1.0
    now: int | Tensor = 0
    ttl: int | Tensor = 0
    evict: int = 1
    threshold: int = 1
    counts_N: Tensor | None = None
    may_insert_N: Tensor | None = None


class AssignCall(NamedTuple):
    """One call of `zch_assign_` in the form that kernels take: each number as a number or as a tensor.

    step_there, now_there: 0-d int64 on the ids' device; if given, they replace `step` and `now`.
    """

    ids_N: Tensor
    counts_N: Tensor | None
    may_insert_N: Tensor | None
    ttl_N: Tensor | None
    state: HashState
    table: HashRange
    step: int
    now: int
    policy: int
    ttl: int
    evict: int
    threshold: int
    exponent: float
    step_there: Tensor | None = None
    now_there: Tensor | None = None

    @staticmethod
    def of(ids_N: Tensor, state: HashState, table: HashRange, options: AssignOptions) -> AssignCall:
        """Return the call for a batch."""
        ttl_N, ttl = _number_or_tensor(options.ttl)
        step_there, step = _number_or_tensor(options.step)
        now_there, now = _number_or_tensor(options.now)
        return AssignCall(
            ids_N, options.counts_N, options.may_insert_N, ttl_N, state, table, step, now, int(options.policy), ttl,
            int(options.evict), options.threshold, options.exponent, step_there, now_there,
        )  # fmt: skip

    @staticmethod
    def unpack(
        ids_N: Tensor, entries: Sequence[Tensor | None], state: Sequence[Tensor], table: Sequence[int],
        numbers: Sequence[int], exponent: float, clocks: Sequence[Tensor | None],
    ) -> AssignCall:  # fmt: skip
        """Return the call from the op's arguments; the inverse of `packed`."""
        counts_N, may_insert_N, ttl_N = entries
        step, now, policy, ttl, evict, threshold = numbers
        return AssignCall(
            ids_N, counts_N, may_insert_N, ttl_N, HashState(*state), HashRange(*table), step, now, policy, ttl, evict,
            threshold, exponent, *clocks,
        )  # fmt: skip

    def packed(self) -> tuple[Any, ...]:
        """Return the arguments of the op."""
        return (
            self.ids_N, [self.counts_N, self.may_insert_N, self.ttl_N], list(self.state), list(self.table),
            [self.step, self.now, self.policy, self.ttl, self.evict, self.threshold], self.exponent,
            [self.step_there, self.now_there],
        )  # fmt: skip

    @property
    def held(self) -> int:
        """Number of buckets in the state."""
        return self.state.ids_E.shape[0] // self.table.slots

    def evicts(self, step: int) -> bool:
        """Return True if ids may evict in this step. evict 4: not in step 6, but in step 8."""
        return self.evict > 0 and step % self.evict == 0

    def numbers(self) -> tuple[int, int]:
        """Return the step and the time as ints; this may synchronize with the device."""
        step = self.step if self.step_there is None else int(self.step_there)
        return step, self.now if self.now_there is None else int(self.now_there)


class ResizeCall(NamedTuple):
    """One call of `zch_resize` in the form that kernels take. The state's counters are not used."""

    state: HashState
    table: HashRange
    new_buckets: int
    new_slots: int
    step: int
    policy: int
    exponent: float

    @staticmethod
    def unpack(state: Sequence[Tensor], table: Sequence[int], numbers: Sequence[int], exponent: float) -> ResizeCall:
        """Return the call from the op's arguments; the inverse of `packed`."""
        new_buckets, new_slots, step, policy = numbers
        return ResizeCall(HashState(*state), HashRange(*table), new_buckets, new_slots, step, policy, exponent)

    def packed(self) -> tuple[Any, ...]:
        """Return the arguments of the op."""
        numbers = [self.new_buckets, self.new_slots, self.step, self.policy]
        return list(self.state), list(self.table), numbers, self.exponent

    @property
    def held(self) -> int:
        """Number of buckets in the state."""
        return self.state.ids_E.shape[0] // self.table.slots

    def become(self, buckets: int) -> int:
        """Return the number of new buckets made from some old ones; it also converts the number of a first bucket."""
        return buckets * self.new_buckets // self.table.buckets


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


class ResizedState(NamedTuple):
    """A new state, and each old row's new row (-1: it was not used, -2: its id was dropped)."""

    state: HashState
    moved_E: Tensor


def empty_state(
    held: int, slots: int, *, expires: bool = False, counters: int = 0, device: torch.device | str | None = None,
) -> HashState:  # fmt: skip
    """Return the state of `held` empty buckets; `counters` per bucket are for admission."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    rows = held * slots
    return HashState(
        zeros(rows), zeros(rows, dtype=torch.bool), zeros(rows), zeros(rows), zeros(rows),
        zeros(rows if expires else 0), zeros(held, counters, dtype=torch.int32),
    )  # fmt: skip
