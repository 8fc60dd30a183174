"""One table of ids kept twice, by the kernels under test and by the reference: they must not differ in one bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.hash.definition import HashState, empty_state
from tilerec.ops.hash.state import AssignCall, HashRange, ResizeCall
from tilerec.ops.runtime.library import LIBRARY


def equal(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


def copy_of(state: HashState) -> HashState:
    return HashState(*(values.clone() for values in state))


def assign_call(*arguments: Any) -> AssignCall:
    """The call of ids, counts, may_insert, ttl, the state's tensors, first, buckets, slots, max_probe, step, ..."""
    entries, state, (first, buckets, slots, max_probe) = arguments[:4], arguments[4:11], arguments[11:15]
    step, now, policy, exponent, ttl, evict, threshold, *clocks = arguments[15:]
    table = HashRange(buckets, slots, max_probe, first)
    return AssignCall(
        *entries, HashState(*state), table, step, now, policy, ttl, int(evict), threshold, exponent, *clocks
    )


def resize_call(*arguments: Any) -> ResizeCall:
    """The call of the state's tensors per row, first, buckets, slots, new_buckets, new_slots, max_probe, step, ..."""
    state, (first, buckets, slots, new_buckets, new_slots, max_probe) = arguments[:6], arguments[6:12]
    step, policy, exponent = arguments[12:]
    none = state[0].new_empty((0, 0), dtype=torch.int32)
    table = HashRange(buckets, slots, max_probe, first)
    return ResizeCall(HashState(*state, none), table, new_buckets, new_slots, step, policy, exponent)


def flat(kernels: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Kernels that take what `assign_call` and `resize_call` take."""

    def packing(kernel: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: kernel(*call(*arguments).packed())

    calls = {"zch_assign_": assign_call, "zch_assign_each_": assign_call, "zch_resize": resize_call}
    return {name: packing(kernel, calls[name]) if name in calls else kernel for name, kernel in kernels.items()}


PACKED = {name: kernel for name, kernel in LIBRARY.references.items() if name.startswith("zch_")}
REFERENCE = flat(PACKED)


class Pair:
    """One table, kept by some kernels and by the reference."""

    def __init__(
        self,
        kernels: dict[str, Callable[..., Any]],
        buckets: int,
        slots: int,
        first: int,
        held: int,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.kernels, self.place = kernels, (first, buckets, slots)
        self.held, self.device = held, device
        self.theirs = empty_state(held, slots, **options)
        self.mine = HashState(*(self._there(values) for values in copy_of(self.theirs)))

    def _there(self, values: Any) -> Any:
        return values.to(self.device) if isinstance(values, Tensor) else values

    def own(self, ids_N: Tensor) -> Tensor:
        bucket_N = REFERENCE["zch_buckets"](ids_N, self.place[1])
        equal([self.kernels["zch_buckets"](self._there(ids_N), self.place[1])], [bucket_N])
        return ids_N[(bucket_N >= self.place[0]) & (bucket_N < self.place[0] + self.held)]

    def assign(self, entries: Sequence[Tensor | None], max_probe: int, *rest: Any) -> Sequence[Tensor]:
        tail = (*self.place, max_probe, *rest)
        entries_there = [self._there(values) for values in entries]
        result = REFERENCE["zch_assign_"](*entries, *self.theirs, *tail)
        equal(self.kernels["zch_assign_"](*entries_there, *self.mine, *tail), result)
        equal(self.mine, self.theirs)
        return result  # type: ignore[no-any-return]

    def find(self, ids_N: Tensor, max_probe: int) -> None:
        self._same("zch_find", ids_N, self.mine.ids_E, self.mine.used_E, *self.place, max_probe)

    def resize(self, *rest: Any) -> None:
        self._same("zch_resize", *self.mine[:6], *self.place, *rest)

    def _same(self, op: str, *arguments: Any) -> None:
        expected = REFERENCE[op](*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
        equal(self.kernels[op](*(self._there(x) for x in arguments)), expected)
