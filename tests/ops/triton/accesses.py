"""What a launch did to memory, and which of it has no order on a GPU.

Nouns
  access   one load, store or atomic instruction of one program: the addresses of its lanes that were not masked
  unit     the bytes that are compared: as many as the smallest access to that memory takes
  race     a unit that two programs touch, at least one of them changing it, unless all are atomics. Programs of a
           launch have no order, so what is read, or what remains, is anybody's guess
  hazard   the same between two accesses of one program with no barrier between: its lanes are threads of one warp or
           several, and threads of different warps have no order either
  epoch    the part of a program between two barriers
  handed over  what a program touches before it releases (a barrier, then an atomic that releases) and another touches
            behind its acquisition (an atomic on that address that acquires and came later, then a barrier): these have
            an order, so they do not race
  home     the memory block (a tensor's storage) that an address lies in, by its first byte

Example: program 0 stores bytes [0, 4) and program 1 loads [0, 4): a race. Both add atomically: none. Program 0 stores
element i by lane i, then loads element i by lane i: no hazard, a thread sees what it wrote itself. It loads them by
lane 7 - i: a hazard, if the program has more than one warp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]

READ, WRITE, ATOMIC = "read", "write", "atomic"
_WARP = 32


class Access(NamedTuple):
    kind: str
    program: int
    epoch: int
    size: int  # bytes of an element
    shape: tuple[int, ...]
    lane: Numbers  # of each address: its place in the shape, counted through
    address: Numbers
    value: Numbers | None  # what a store writes, as unsigned integers
    pointer: str  # the argument that the addresses were counted from
    homes: tuple[int, ...]
    site: str  # file:line
    order: str = ""  # that an atomic makes for other programs: acquire, release, acquire_release, relaxed

    @property
    def many(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return f"{self.kind} of {self.pointer} at {self.site}"


class Clash(NamedTuple):
    """Two accesses that should have an order."""

    one: Access
    other: Access
    address: int
    units: int  # how many more there are like it
    same_value: bool  # both only write, and the same


def races(accesses: Sequence[Access]) -> list[Clash]:
    """One for each pair of pointers that race."""
    own = _of_changed_homes(accesses)
    if len({access.program for access in own}) < 2:
        return []
    programs = np.array([access.program for access in own])
    return _clashes(own, programs, np.zeros(len(own), dtype=np.int64), HandedOver(own))


def hazards(accesses: Sequence[Access], warps: int) -> list[Clash]:
    """Of one program. Where it has several warps, what fewer lanes than threads access is accessed by several warps."""
    own = _of_changed_homes(accesses)
    if len(own) < 2:
        return []
    return _clashes(
        own,
        np.arange(len(own)),
        np.array([access.epoch for access in own]),
        None,
        _WARP * warps if warps > 1 else 0,
    )


class HandedOver:
    """Which accesses of different programs are handed over, one to the other. They come in the order of their run."""

    def __init__(self, own: Sequence[Access]) -> None:
        self.own = own
        self._atomics: dict[int, list[int]] = {}
        for index, access in enumerate(own):
            if access.kind == ATOMIC and access.order != "relaxed":
                self._atomics.setdefault(access.program, []).append(index)
        self._known: dict[tuple[int, int], bool] = {}

    def all_of(self, numbers: Numbers) -> bool:
        """Of the accesses to a unit: each change and each access of another program."""
        some = sorted(set(numbers.tolist()))
        kinds = [self.own[number].kind for number in some]
        return bool(self._atomics) and all(
            self._pair(one, other)
            for i, one in enumerate(some)
            for j, other in enumerate(some[:i])
            if self.own[one].program != self.own[other].program
            and (kinds[i] != READ or kinds[j] != READ)
            and not kinds[i] == kinds[j] == ATOMIC
        )

    def _pair(self, later: int, earlier: int) -> bool:
        known = self._known.get((earlier, later))
        if known is None:
            one, other = self.own[earlier], self.own[later]
            released, acquired = set(), set()
            for index in self._atomics.get(one.program, []):
                atomic = self.own[index]
                if index > earlier and atomic.epoch > one.epoch and atomic.order != "acquire":
                    released.update(atomic.address.tolist())
            for index in self._atomics.get(other.program, []):
                atomic = self.own[index]
                if index < later and atomic.epoch < other.epoch and atomic.order != "release":
                    acquired.update(atomic.address.tolist())
            known = self._known[earlier, later] = not released.isdisjoint(acquired)
        return known


def _of_changed_homes(accesses: Sequence[Access]) -> list[Access]:
    changed = {home for access in accesses if access.kind != READ for home in access.homes}
    return [access for access in accesses if not changed.isdisjoint(access.homes)]


def _clashes(
    own: Sequence[Access],
    actor_A: Numbers,
    epoch_A: Numbers,
    handed_over: HandedOver | None,
    threads: int = -1,
) -> list[Clash]:
    """Units that several actors touch in one epoch. threads: -1 where actors are programs; else what lanes are told
    apart by, and accesses of fewer lanes are by several threads each. handed_over: of programs."""
    size = min(access.size for access in own)
    kept = [index for index, access in enumerate(own) if access.kind != READ]
    changed = np.unique(np.concatenate([_units(own[index], size) for index in kept]))
    units, numbers, lanes, values = [], [], [], []
    shapes: dict[tuple[int, ...], int] = {}
    for index, access in enumerate(own):
        unit, each = _units(access, size), access.size // size
        lane = (shapes.setdefault(access.shape, len(shapes)) << 40) + np.repeat(access.lane, each)
        value = np.zeros(len(unit), np.uint64)
        if access.value is not None:
            value = np.ascontiguousarray(access.value).view(f"u{size}").astype(np.uint64)
        if access.kind == READ:
            here = changed[np.minimum(np.searchsorted(changed, unit), len(changed) - 1)] == unit
            unit, lane, value = unit[here], lane[here], value[here]
        units.append(unit)
        lanes.append(lane)
        values.append(value)
        numbers.append(np.full(len(unit), index))
    unit, number = np.concatenate(units), np.concatenate(numbers)
    order = np.lexsort((epoch_A[number], unit))
    unit, number = unit[order], number[order]
    lane, value, epoch = np.concatenate(lanes)[order], np.concatenate(values)[order], epoch_A[number]
    first = np.flatnonzero(
        np.concatenate([[True], (unit[1:] != unit[:-1]) | (epoch[1:] != epoch[:-1])])
    )  # fmt: skip

    def differ(what: Numbers) -> Numbers:
        return np.minimum.reduceat(what, first) != np.maximum.reduceat(what, first)

    kind = np.array([(READ, WRITE, ATOMIC).index(access.kind) for access in own])[number]
    changes = np.maximum.reduceat((kind != 0).astype(np.int8), first) == 1
    atomics = np.minimum.reduceat(kind, first) == 2
    clash = differ(actor_A[number]) & changes & ~atomics
    same = (np.minimum.reduceat(kind, first) == 1) & (np.maximum.reduceat(kind, first) == 1) & ~differ(value)
    if threads >= 0:
        few = np.array([access.many < threads for access in own])[number]
        clash &= ~same & (differ(lane) | (np.maximum.reduceat(few.astype(np.int8), first) == 1))
    found: dict[tuple[str, str, bool], Clash] = {}
    behind = np.append(first[1:], len(unit))
    for group in np.flatnonzero(clash):
        begin, end = first[group], behind[group]
        if handed_over is not None and handed_over.all_of(number[begin:end]):
            continue
        pair = _pair(own, actor_A, number[begin:end], lane[begin:end], threads)
        key = (str(pair[0]), str(pair[1]), bool(same[group]))
        known = found.get(key)
        more = 1 if known is None else known.units + 1
        found[key] = Clash(*pair, int(unit[begin]) * size, more, bool(same[group]))
        if len(found) > 20 or more > 1000:
            break
    return list(found.values())


def _pair(
    own: Sequence[Access], actor_A: Numbers, number: Numbers, lane: Numbers, threads: int
) -> tuple[Access, Access]:
    """A change, and an access of another actor (of other lanes, if there is one)."""
    kinds = [own[n].kind for n in number]
    for change in (i for i, kind in enumerate(kinds) if kind != READ):
        others = [i for i in range(len(number)) if actor_A[number[i]] != actor_A[number[change]]]
        others = [i for i in others if not kinds[i] == kinds[change] == ATOMIC]
        others.sort(key=lambda i: lane[i] == lane[change])
        if others:
            one, other = sorted((change, others[0]), key=lambda i: number[i])
            return own[number[one]], own[number[other]]
    raise AssertionError("a clash has two sides")


def _units(access: Access, size: int) -> Numbers:
    each = access.size // size
    unit = access.address // np.uint64(size)
    if each == 1:
        return unit
    return (unit[:, None] + np.arange(each, dtype=np.uint64)).reshape(-1)


def lanes_disagree(access: Access) -> int | None:
    """An address to which two lanes of one store write different values."""
    if access.value is None or len(access.address) < 2:
        return None
    order = np.argsort(access.address, kind="stable")
    address, value = access.address[order], access.value[order]
    bad = (address[1:] == address[:-1]) & (value[1:] != value[:-1])
    return int(address[1:][bad][0]) if bad.any() else None
