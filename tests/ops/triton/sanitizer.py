"""What `compute-sanitizer` tells on a GPU, and more, told of interpreted kernels: no GPU is needed.

The interpreter computes every address that a kernel touches. `sanitized()` looks at all of them, launch by launch:

  memory    an access that no mask hides lies in the tensor that its pointer was given, and is a multiple of its size.
            Pointers from which distances to other tensors are counted (`ROAMS`) may touch any tensor that is alive and
            has been asked for its address (`data_ptr`)
  masked    what a masked load without `other=` gives is undefined on a GPU, and zeros in the interpreter. Here it is
            NaN or a large odd number, so that results that depend on it are wrong (but of loads of one element)
  race      between programs: `accesses.py`. Stores of one value by several programs must be named in `SHARED`. What one
            hands to another by an atomic that releases and one that acquires is no race
  lanes     of one store do not write different values to one address
  hazard    within a program of several warps: `accesses.py`. Those of one warp are kept in `one_warp`: its threads take
            each instruction together, so they have an order, but none that CUDA's memory model promises
  hint      what `tl.multiple_of`, `max_contiguous` and `max_constancy` say is true. They, and arguments whose alignment
            Triton looks at itself, are what vector accesses are derived from; a lie is a misaligned address
  wrap      int32 sums, differences and products are exact. `may wrap`: they are, and would not be in a larger launch:
            program numbers, integer arguments and loaded int32 numbers can be as large as their type, or as `MOST` says
  divisor   divisors are not 0, and shifts less than the width
  order     the launch runs once more with its programs reversed, or shuffled in its turn; the bits are the same

Races and order are not looked at where a report (`reports.py`) is taken: an error takes the place of the results.

What it cannot see: more than the shapes that a test runs; roaming into the wrong tensor (results would differ); reads
of memory that nobody has written (`torch.empty` is poisoned for that); what the compiler makes of it; waiting for each
other (locks); accesses that overlap with another launch's.

What it lets pass, and why: `reasons.py`. How it listens: `hooks.py`.

Nouns
  pointer   an argument that is a tensor; what is added to it points into its tensor, its root
  bound     the most that an int32 number can be in any launch; what has one is a count or a place, and not negative

Example, 5 floats, a block of 8 and a store without a mask:
  copy: memory: write of out at test_sanitizer.py:71, program (0, 0, 0): 3 of 8 addresses are not in the 20 bytes of its
  tensor, the first 20 bytes behind its begin
"""

from __future__ import annotations

import contextlib
import os
import random
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from tests.ops.triton.accesses import READ, WRITE, Access, Numbers, hazards, lanes_disagree, races
from tests.ops.triton.hooks import INT32, Hooks, SanitizerError, site
from tests.ops.triton.reasons import GRID, MOST, ROAMS, SHARED, TOLD_BY_ANY

REVERSED, SHUFFLED = "reversed", "shuffled"


class Root(NamedTuple):
    name: str
    begin: int
    end: int
    home: int
    roams: bool


class Memory:
    """The tensors whose addresses the host has asked for, as far as they are alive, by the bytes of their storages."""

    def __init__(self) -> None:
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._begins: Numbers = np.zeros(0, np.uint64)
        self._ends: Numbers = self._begins

    def note(self, tensor: torch.Tensor) -> None:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # not a tracer's, nor a wrapper
            self._tensors[id(tensor)] = weakref.ref(tensor)

    def look(self) -> None:
        """Which of them are alive, before a launch."""
        spans: dict[int, int] = {}
        for number, reference in list(self._tensors.items()):
            tensor = reference()
            if tensor is None:
                del self._tensors[number]
            elif tensor.device.type == "cpu" and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                begin, size = storage.data_ptr(), storage.nbytes()
                if begin and size:
                    spans[begin] = max(begin + size, spans.get(begin, 0))
        self._begins = np.array(sorted(spans), np.uint64)
        self._ends = np.array([spans[begin] for begin in sorted(spans)], np.uint64)

    def find(self, address: Numbers, size: int) -> tuple[Numbers, Numbers]:
        """Which addresses are in a storage, and where it begins."""
        if not len(self._begins):
            return np.zeros(len(address), bool), address
        at = np.searchsorted(self._begins, address, side="right").astype(np.int64) - 1
        inside = (at >= 0) & (address + np.uint64(size) <= self._ends[np.maximum(at, 0)])
        return inside, self._begins[np.maximum(at, 0)]


class Launch:
    """One run of a grid: what it touched, and how to undo it."""

    def __init__(self, kernel: str, warps: int, names: Sequence[str], order: str) -> None:
        self.kernel, self.warps, self.order = kernel, warps, order
        self.names = iter(names)
        self.grid = (1, 1, 1)
        self.places: list[int] = []
        self.next = 0
        self.program = -1
        self.epoch = 0
        self.accesses: list[Access] = []  # of this program
        self.all: list[Access] = []
        self.begins: dict[str, int] = {}  # of arguments' tensors
        self.written: list[tuple[str, Numbers, Numbers]] = []  # pointer, addresses, what was there

    def begin(self, grid: tuple[int, int, int]) -> None:
        self.grid = grid
        self.places = list(range(grid[0] * grid[1] * grid[2]))
        if self.order == REVERSED:
            self.places.reverse()
        elif self.order == SHUFFLED:
            random.Random(len(self.places)).shuffle(self.places)

    def turn(self) -> tuple[int, int, int]:
        """The program that comes next."""
        self.program = self.places[self.next]
        self.next += 1
        self.epoch = 0
        return self.place(self.program)

    def told(self) -> bool:
        """Whether it, or a launch before it, has found bad input: then nobody will see what it leaves."""
        begins = [begin for name, begin in self.begins.items() if name in TOLD_BY_ANY and begin]
        return bool(_read(np.array(begins, np.uint64), 8).any())

    def place(self, program: int) -> tuple[int, int, int]:
        rest, z = divmod(program, self.grid[2])
        x, y = divmod(rest, self.grid[1])
        return x, y, z


class Sanitizer:
    """What was found; `launches` counts kernels' launches, `one_warp` has the hazards that one warp does not have."""

    def __init__(
        self,
        roams: Mapping[str, tuple[str, ...]] = ROAMS,
        shared: Mapping[tuple[str, str], str] = SHARED,
        most: Mapping[tuple[str, str], int] = MOST,
        orders: Sequence[str] = (REVERSED, SHUFFLED),
    ) -> None:
        self.roams, self.shared, self.most, self.orders = roams, shared, most, orders
        self.launches: Counter[str] = Counter()
        self.programs: Counter[str] = Counter()
        self.one_warp: set[str] = set()
        self.findings: dict[tuple[str, ...], str] = {}
        self.memory = Memory()
        self.now: Launch | None = None

    # ---------------------------------------------------------------------------------------------- findings

    def found(self, kind: str, where: str, text: str) -> None:
        """One finding of a kind and a place is kept."""
        launch = self.now
        assert launch is not None
        program = f", program {launch.place(launch.program)}" if launch.program >= 0 else ""
        self.findings.setdefault((launch.kernel, kind, where), f"{launch.kernel}: {kind}: {where}{program}: {text}")

    def run(self, kernel: Any, again: Callable[[], Any], names: Sequence[str], warps: int) -> Any:
        """A launch, and that again in another order."""
        name = kernel.__name__
        launch = self.now = Launch(name, warps, names, "")
        before = len(self.findings)
        self.memory.look()
        self.launches[name] += 1
        try:
            result = again()
            self._end_program(launch)
            self._look_for_races(launch)
            if self.orders and len(launch.places) > 1 and not launch.told() and len(self.findings) == before:
                self._repeat(launch, self.orders[self.launches[name] % len(self.orders)], names, again)
        except Exception as error:
            if len(self.findings) > before:
                raise SanitizerError("\n".join(self.findings.values())) from error
            raise
        finally:
            self.now = None
        self.programs[name] += len(launch.places)
        if len(self.findings) > before:
            raise SanitizerError("\n".join(self.findings.values()))
        return result

    def _repeat(self, launch: Launch, order: str, names: Sequence[str], again: Callable[[], Any]) -> None:
        left, wanted = _contents(launch), _contents(launch, TOLD_BY_ANY)
        _undo(launch)
        other = self.now = Launch(launch.kernel, launch.warps, names, order)
        try:
            again()
        finally:
            other.program = -1
            got = _contents(other, TOLD_BY_ANY)
            _undo(other)
            for size, (address, value) in left.items():
                _write(address, value, size)
        for size in wanted.keys() | got.keys():
            address, value = wanted.get(size, _NOTHING)
            other_address, other_value = got.get(size, _NOTHING)
            if not np.array_equal(address, other_address):
                self.found("order", f"{order} programs", "write to other addresses")
            elif (value != other_value).any():
                bad = address[value != other_value]
                pointer = next(p for p, a, _ in launch.written if np.isin(bad[0], a))
                self.found("order", f"{order} programs", f"leave other numbers in {pointer}, {len(bad)} of them")

    # ---------------------------------------------------------------------------------------------- events

    def begin_program(self) -> tuple[int, int, int]:
        assert self.now is not None
        self._end_program(self.now)
        return self.now.turn()

    def barrier(self) -> None:
        if self.now is not None:
            self.now.epoch += 1

    def access(
        self, kind: str, pointers: Any, mask: Numbers, size: int, value: Numbers | None, order: str = ""
    ) -> Numbers:
        """The mask of what may be done; the rest would leave the tensor."""
        launch = self.now
        if launch is None:
            return mask
        address = np.ascontiguousarray(pointers.data).reshape(-1)
        taken = np.broadcast_to(mask, pointers.data.shape).reshape(-1)
        lane = np.flatnonzero(taken)
        if not len(lane):
            return mask
        address = address[lane]
        place, root = site(), pointers.attr.get("root")
        name = "a pointer" if root is None else root.name
        where = f"{kind} of {name} at {place}"
        if (address % np.uint64(size)).any():
            self.found("memory", where, f"addresses are no multiples of the {size} bytes that it takes")
        homes: tuple[int, ...] = ()
        inside = np.ones(len(address), bool)
        if root is not None and root.begin <= int(address.min()) and int(address.max()) + size <= root.end:
            homes = (root.home,)
        elif root is None or root.roams:
            inside, home = self.memory.find(address, size)
            homes = tuple(np.unique(home[inside]).tolist())
            if not inside.all():
                self.found(
                    "memory",
                    where,
                    f"{(~inside).sum()} of {len(inside)} addresses are in no tensor that the host knows the address of",
                )
        else:
            inside = (address >= root.begin) & (address + np.uint64(size) <= root.end)
            homes = (root.home,)
            first = int(address[~inside][0]) - root.begin
            self.found(
                "memory", where,
                f"{(~inside).sum()} of {len(inside)} addresses are not in the {root.end - root.begin} bytes of its "
                f"tensor, the first {first} bytes behind its begin. (A pointer that other tensors' distances are "
                "counted from belongs into ROAMS.)",
            )  # fmt: skip
        if not inside.all():
            mask = np.zeros(address.shape[0], bool) if lane is None else _only(mask, pointers.data, lane[inside])
            address, lane = address[inside], lane[inside]
        if value is not None:
            value = _bits(np.broadcast_to(value, pointers.data.shape).reshape(-1)[lane], size)
        if kind != READ:
            launch.written.append((name, address, _read(address, size)))
        if not launch.order and len(address):
            access = Access(
                kind, launch.program, launch.epoch, size, pointers.data.shape, lane, address, value, name, homes, place,
                order,
            )  # fmt: skip
            launch.accesses.append(access)
            if kind == WRITE and (bad := lanes_disagree(access)) is not None:
                self.found("lanes", where, f"two lanes write different values to address {bad:#x}")
        return mask

    def _end_program(self, launch: Launch) -> None:
        if launch.order or launch.program < 0:
            return
        for clash in hazards(launch.accesses, launch.warps):
            pair = f"{clash.one}, then {clash.other}"
            if launch.warps > 1:
                self.found("hazard", pair, f"other threads of {launch.warps} warps, and no barrier between")
            else:
                self.one_warp.add(f"{launch.kernel}: {pair}")
        launch.all += launch.accesses
        launch.accesses = []

    def _look_for_races(self, launch: Launch) -> None:
        launch.program = -1
        for clash in [] if launch.told() else races(launch.all):
            pointers = {clash.one.pointer, clash.other.pointer}
            if clash.same_value and all((launch.kernel, pointer) in self.shared for pointer in pointers):
                continue
            places = [launch.place(side.program) for side in (clash.one, clash.other)]
            what = "write the same value" if clash.same_value else "touch the same memory"
            self.found(
                "race",
                f"{clash.one} | {clash.other}",
                f"programs {places[0]} and {places[1]} {what} at {clash.units} places",
            )

    # ---------------------------------------------------------------------------------------------- arguments

    def argument(self, value: Any, made: Any) -> None:
        """Note which argument a pointer is, and how large a number can be."""
        launch = self.now
        if launch is None:
            return
        name = next(launch.names)
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            begin = value.data_ptr()
            reach = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
            end = begin + (reach + 1) * value.element_size() if value.numel() else begin
            launch.begins[name] = begin if value.numel() else 0
            roams = name in self.roams.get(launch.kernel, ())
            made.handle.attr["root"] = Root(name, begin, end, storage.data_ptr(), roams)
        elif isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT32:
            made.handle.attr["bound"] = self.most.get((launch.kernel, name), INT32)

    def grid_bound(self, what: str, axis: int) -> int:
        assert self.now is not None
        return self.most.get((self.now.kernel, f"{what}({axis})"), GRID[axis])


# ------------------------------------------------------------------------------------------------ memory

_NOTHING = (np.zeros(0, np.uint64), np.zeros(0, np.uint64))


def _interpreter() -> Any:
    from triton.runtime import interpreter

    return interpreter._interpreter


def _read(address: Numbers, size: int) -> Numbers:
    kind = np.dtype(f"u{size}")
    every = np.ones(len(address), bool)
    return np.array(_interpreter().load(address, every, np.zeros(len(address), kind), kind))


def _write(address: Numbers, value: Numbers, size: int) -> None:
    _interpreter().store(address, value.astype(f"u{size}"), np.ones(len(address), bool))


def _bits(value: Numbers, size: int) -> Numbers:
    value = np.ascontiguousarray(value)
    assert value.itemsize == size, f"stores of {size} bytes get values of {value.itemsize}"
    return value.view(f"u{size}")


def _only(mask: Numbers, like: Numbers, lanes: Numbers) -> Numbers:
    left = np.zeros(like.size, bool)
    left[lanes] = True
    return left.reshape(like.shape)


def _undo(launch: Launch) -> None:
    for _, address, value in reversed(launch.written):
        _write(address, value, value.itemsize)


def _contents(launch: Launch, but: Container[str] = ()) -> dict[int, tuple[Numbers, Numbers]]:
    """What is where the launch wrote, by the size of its numbers; but for what it wrote through some pointers."""
    addresses: dict[int, list[Numbers]] = {}
    for pointer, address, value in launch.written:
        if pointer not in but:
            addresses.setdefault(value.itemsize, []).append(address)
    merged = {size: np.unique(np.concatenate(own)) for size, own in addresses.items()}
    return {size: (address, _read(address, size)) for size, address in merged.items()}


@contextlib.contextmanager
def sanitized(watch: Sanitizer | None = None) -> Iterator[Sanitizer]:
    """Launches within raise a `SanitizerError` for what they must not do; compiled ones are not looked at."""
    watch = watch or Sanitizer()
    if not triton.knobs.runtime.interpret:
        yield watch
        return
    hooks = Hooks(watch)
    try:
        hooks.install()
        yield watch
    finally:
        hooks.remove()


def asked_for() -> bool:
    """Whether every test of kernels is to run so: TILEREC_SANITIZE=1, some minutes."""
    return os.environ.get("TILEREC_SANITIZE") == "1"


def sanitized_if_asked() -> contextlib.AbstractContextManager[object]:
    """For scripts in processes of their own."""
    return sanitized() if asked_for() else contextlib.nullcontext()
