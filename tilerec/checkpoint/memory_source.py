"""`MemorySource`: a job's state in the memory that earlier processes have left, as a source to load.

    file of rank 0   steps 7, 8       table rows [0, 500), dense part            replicas hold the same boxes:
    file of rank 1   steps 8, 9       table rows [0, 500), dense part            one of them is enough
    rank 2 died      none
    file of rank 3   steps 7, 8, 9    table rows [500, 999), dense part
                     step 8 can be reached by all; later writes are undone

Each rank reads the boxes that it needs from its own file. Boxes that this lacks come from a rank whose file has them,
in messages of bounded size. All ranks exchange the boxes of their files once, so each plans for itself.

Legend: W ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tilerec.checkpoint.chain import Wanted
from tilerec.checkpoint.data_file import bytes_of
from tilerec.checkpoint.dtypes import DTYPES
from tilerec.checkpoint.manifest import SavedTensor
from tilerec.checkpoint.memory_file import read_memory
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.checkpoint.step_journal import Write, undo
from tilerec.checkpoint.tree import flatten, unflatten
from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue

MESSAGE_BYTES = 1 << 24
"""Most bytes that a rank receives in one exchange, unless one row is larger."""
_WHERE = "the memory of the ranks"


class HeldMemory:
    """The memory of one earlier process. Raises OSError.

    steps: that can be reached.
    """

    def __init__(self, path: Path) -> None:
        self._state = read_memory(path)
        self.steps = {int(step) for step in self._state["kept"]}

    def described(self, step: int) -> Held:
        """Return the contents at a step, for other ranks."""
        kept = self._state["kept"][str(step)]
        tensors = kept["layout"]["tensors"]
        return Held(
            kept["layout"]["tree"],
            {name: (dtype, tuple(shape)) for name, (dtype, shape, _) in tensors.items()},
            {name: [Box(tuple(one[0]), tuple(one[1])) for one in places] for name, (_, _, places) in tensors.items()},
            _copied(kept["values"]),
        )

    def pieces(self, step: int) -> dict[str, list[Piece]]:
        """Undo the writes since the beginning of a step, and return the pieces by tensor."""
        later = sorted(int(begun) for begun in self._state["writes"] if int(begun) >= step)
        writes = [Write(*write) for begun in later for write in self._state["writes"][str(begun)]]
        undo(self._state["tables"], writes)
        kept = self._state["kept"][str(step)]
        found: dict[str, list[Piece]] = {}
        for name, (_, _, places) in kept["layout"]["tensors"].items():
            pieces = found[name] = []
            for offsets, sizes, table, k, offset, strides in places:
                whole = kept["copies"][k] if table < 0 else self._state["tables"][table][k]
                memory = whole.as_strided(sizes, strides, whole.storage_offset() + offset)
                pieces.append(Piece(Box(tuple(offsets), tuple(sizes)), memory))
        return found


class Held(NamedTuple):
    """Contents of a rank's memory at one step.

    Args:
        tree: text of the state tree.
        tensors: names of dtypes, and shapes of the whole tensors.
        boxes: those that the rank holds.
        values: of the caller.
    """

    tree: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    boxes: dict[str, list[Box]]
    values: Mapping[str, Any]


class _Request(NamedTuple):
    """A box of a tensor that a rank needs from another one."""

    holder: int
    name: str
    box: Box


class MemorySource:
    """The memory of all ranks at the newest step that all of them can reach; see `Source`.

    step: that step. values: of the caller, at this step.
    """

    def __init__(self, group: Group, own: HeldMemory | None, step: int) -> None:
        self._group, self.step = group, step
        self._pieces = own.pieces(step) if own is not None else {}
        self._held: list[Held | None] = _gathered(group, None if own is None else own.described(step))
        first = next(one for one in self._held if one is not None)
        self.values = first.values
        self.path, self.changes = _WHERE, None
        self.state = JsonValue.of(json.loads(first.tree), _WHERE)
        self.tensors: Mapping[str, SavedTensor] = {
            name: SavedTensor(DTYPES[dtype], shape, ()) for name, (dtype, shape) in first.tensors.items()
        }

    @staticmethod
    def of(group: Group, own: HeldMemory | None) -> MemorySource | None:
        """Return the memory of all ranks; None if no step can be reached by all that have some. Collective.

        Args:
            own: of the earlier process of this rank; None if it left none.
        """
        steps = [one for one in _gathered(group, None if own is None else own.steps) if one is not None]
        common = set.intersection(*steps) if steps else set()
        return MemorySource(group, own, max(common)) if common else None

    @torch.no_grad()
    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill the pieces. Collective.

        Raises:
            ConfigError: no rank holds some cells; nothing is written then. All ranks raise.
        """
        with on_all_ranks(self._group, _WHERE, "its plan"):
            copies, requests = self._planned(wanted)
        for source, place in copies:
            place.copy_(source)
        self._exchange(wanted, requests)

    def _planned(self, wanted: Sequence[Wanted]) -> tuple[list[tuple[Tensor, Tensor]], list[list[_Request]]]:
        """Return the copies within this rank, and the requests for each wanted piece, in its order."""
        rank, size = self._group.rank, self._group.size
        holders = [rank, *((rank + i) % size for i in range(1, size))]  # so ranks ask different replicas
        copies: list[tuple[Tensor, Tensor]] = []
        requests: list[list[_Request]] = []
        for piece, name in wanted:
            missing = [piece.box]
            own: list[_Request] = []
            for holder in holders:
                held = self._held[holder]
                for number, box in enumerate(held.boxes.get(name, ()) if held is not None and missing else ()):
                    left: list[Box] = []
                    for one in missing:
                        both = one.overlap(box)
                        if both is None:
                            left.append(one)
                            continue
                        left += _without(one, both)
                        if holder == rank:
                            source = self._pieces[name][number]
                            place = piece.box.within(piece.memory, both)
                            copies.append((source.box.within(source.memory, both), place))
                        else:
                            own += [_Request(holder, name, part) for part in _parts(both, piece.memory.itemsize, size)]
                    missing = left
            if missing and piece.box.cells:
                lost = [str(r) for r, one in enumerate(self._held) if one is None]
                raise ConfigError(
                    f"Recovery: got no memory of {name} {list(missing[0].offsets)}, {list(missing[0].sizes)} (ranks "
                    f"{', '.join(lost)} left none); expected a replica of it. Use parallel.group_size, or checkpoints."
                )
            requests.append(own)
        return copies, requests

    def _exchange(self, wanted: Sequence[Wanted], requests: Sequence[Sequence[_Request]]) -> None:
        """Send each rank the boxes that it requests, a bounded part at a time."""
        group = self._group
        places = [(wanted[i].piece, request) for i, some in enumerate(requests) for request in some]
        mine = [request for _, request in places]
        every = cast("list[list[_Request]]", _gathered(group, mine))
        item = {name: saved.dtype.itemsize for name, saved in self.tensors.items()}
        turns = [list(_turns(some, item)) for some in every]
        done = 0
        for turn in range(max(map(len, turns))):
            sends = [_of(_at(own, turn), group.rank) for own in turns]
            receiving = _at(turns[group.rank], turn)
            output = torch.empty(sum(r.box.cells * item[r.name] for r in receiving), dtype=torch.uint8)
            parts = [self._bytes(request) for some in sends for request in some]
            input = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
            handle = group.all_to_all(
                "recovered state", output.to(group.device), input.to(group.device),
                [sum(r.box.cells * item[r.name] for r in _of(receiving, rank)) for rank in range(group.size)],
                [sum(r.box.cells * item[r.name] for r in some) for some in sends],
            )  # fmt: skip
            self._place(handle.wait().cpu(), places[done : done + len(receiving)])
            done += len(receiving)

    def _place(self, received: Tensor, places: Sequence[tuple[Piece, _Request]]) -> None:
        """Write received bytes, which are in the order of their senders."""
        at = 0
        for rank in range(self._group.size):
            for piece, request in places:
                if request.holder == rank:
                    dtype = piece.memory.dtype
                    size = request.box.cells * dtype.itemsize
                    # A copy: a part may begin at any byte, and a view of its dtype may not.
                    values = received[at : at + size].clone().view(dtype).view(request.box.sizes)
                    piece.box.within(piece.memory, request.box).copy_(values)
                    at += size

    def _bytes(self, request: _Request) -> Tensor:
        """Return the bytes of a box that this rank holds."""
        for piece in self._pieces[request.name]:
            if piece.box.overlap(request.box) == request.box:
                return torch.frombuffer(
                    bytearray(bytes_of(piece.box.within(piece.memory, request.box))), dtype=torch.uint8
                )
        raise AssertionError("a rank holds each box that it has named")


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with tensors of their own: pickle writes the whole memory of a view, here that of the file."""
    tree, tensors = flatten(values)
    found: dict[str, Any] = unflatten(JsonValue.of(tree, _WHERE), lambda name, _: tensors[name].clone())
    return found


def _turns(requests: Sequence[_Request], item: Mapping[str, int]) -> Iterator[list[_Request]]:
    """Yield a rank's requests in groups of at most `MESSAGE_BYTES`."""
    turn: list[_Request] = []
    size = 0
    for request in requests:
        more = request.box.cells * item[request.name]
        if turn and size + more > MESSAGE_BYTES:
            yield turn
            turn, size = [], 0
        turn.append(request)
        size += more
    if turn:
        yield turn


def _at(turns: Sequence[list[_Request]], turn: int) -> list[_Request]:
    return turns[turn] if turn < len(turns) else []


def _of(requests: Sequence[_Request], rank: int) -> list[_Request]:
    return [request for request in requests if request.holder == rank]


def _parts(box: Box, itemsize: int, ranks: int) -> Iterator[Box]:
    """Yield a box cut into parts of whole rows that one message can hold."""
    if not box.sizes:
        yield box
        return
    step = max(1, MESSAGE_BYTES // ranks // max(1, box.cells // box.sizes[0] * itemsize))
    for first in range(0, box.sizes[0], step):
        rows = min(step, box.sizes[0] - first)
        yield Box((box.offsets[0] + first, *box.offsets[1:]), (rows, *box.sizes[1:]))


def _without(box: Box, part: Box) -> list[Box]:
    """Return boxes with the cells of a box that are not in a part of it."""
    found = []
    low, sizes = list(box.offsets), list(box.sizes)
    for dim, (first, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        for start, end in ((low[dim], first), (first + size, low[dim] + sizes[dim])):
            if start < end:
                found.append(Box((*low[:dim], start, *low[dim + 1 :]), (*sizes[:dim], end - start, *sizes[dim + 1 :])))
        low[dim], sizes[dim] = first, size
    return found


def _gathered(group: Group, value: object) -> list[Any]:
    return list(group.all_gather_object(value))
