"""One table of ids kept twice, by the kernels under test and by the reference: they must not differ in one bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.hash.definition import REFERENCE, HashState, empty_state


def equal(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


def copy_of(state: HashState) -> HashState:
    return HashState(*(values.clone() for values in state))


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
