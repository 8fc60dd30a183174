"""The move of one table from one tiling to another: its tensors, its new memory, and the switch.

    facts ──► settle: load ──► allocate ──► Transit ──► fill_head ──► make_ready ──► switch

Until the switch the table is unchanged. The switch consists of assignments only.

Nouns
  source  a tensor of every tile of this rank that moves with the table: weight, slot, gradient, state
  kind    shape and dtype of a source. All ranks need it, also those that hold no tile of the table
  head    copies of hot rows. It does not move: a new one is filled from the rows, except for rows that it has already.
          If only the head changes, the tiles keep their memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.parallel.model_tables import Name, table_word
from tilerec.parallel.resharding.chunked_transfer import TableTransfer, TensorTransfer
from tilerec.parallel.resharding.external_optimizers import ExternalOptimizers, number_like
from tilerec.parallel.resharding.head_fill import HeadFill
from tilerec.sharding.changed_rows import ChangedRows
from tilerec.sharding.head_rows import names_of
from tilerec.sharding.retile import RowState, new_peers, replace_tiles
from tilerec.sharding.table import ShardedTable, logical_tensor, tiles_or_empty
from tilerec.sharding.update import TileRows, UpdatePeers
from tilerec.spec.tile import Tile, Tiling, rectangles
from tilerec.spec.topology import Topology
from tilerec.storage.flat_storage import flat_memory
from tilerec.storage.row_file import RowField, tensors_in_file


class SourceKind(NamedTuple):
    """Shape and dtype of a source: the tile's shape (`cells`), or `[rows, *trailing]`."""

    cells: bool
    dtype: torch.dtype
    trailing: tuple[int, ...] = ()

    @property
    def unit(self) -> int:
        """Bytes of a cell, or of a row."""
        size = self.dtype.itemsize
        for count in self.trailing:
            size *= count
        return size


class TableFacts(NamedTuple):
    """Kinds of a rank's sources, and values that all its tiles share (`numbers`), by name.

    A name is a tuple: ("weight",), ("slot", name), ("grad",), ("touched",), ("state", optimizer, key), ("rows", number,
    name).
    """

    kinds: dict[tuple[Any, ...], SourceKind]
    numbers: dict[tuple[Any, ...], Any]


class NewTiles(NamedTuple):
    """Objects that a switch puts in place, one of each per new tile. `steppers`: optimizer number -> state per tile."""

    peers: list[UpdatePeers]
    states: list[dict[str, Tensor]]
    touched: list[ChangedRows | None]
    steppers: dict[int, list[dict[str, Any]]]


class TableMove:
    """The move of a table, under all its names, to another tiling.

    Args:
        names: (path, name) of the table; tied tables have several.
        table: one of the tied tables.
        new: the new tiling.
        steppers: the user's own optimizers of the moving tables.
    """

    def __init__(
        self,
        names: Sequence[Name],
        table: ShardedTable,
        new: Tiling,
        topology: Topology,
        steppers: ExternalOptimizers,
    ) -> None:
        self.names, self.table, self.new = list(names), table, new
        self.old = table.tiling
        self._topology, self._steppers = topology, steppers
        self._sources: dict[tuple[Any, ...], list[Tensor]] = {}
        self._ready: TableFacts | None = None
        self._memory: dict[tuple[Any, ...], list[Tensor]] = {}
        self._heads: dict[tuple[Any, ...], Tensor] = {}
        self._fill: HeadFill | None = None
        self._made: NewTiles | None = None

    @property
    def key(self) -> str:
        """The table's name, for messages."""
        return table_word(self.names[0])

    # ----------------------------------------------------------------------------------------------------- sources

    def facts(self) -> TableFacts | None:
        """Collect this rank's sources and return their facts; None if this rank holds no tile.

        Raises:
            ConfigError: some state of the table cannot move.
        """
        table = self.table
        kinds: dict[tuple[Any, ...], SourceKind] = {}
        numbers: dict[tuple[Any, ...], Any] = {}
        self._sources = {}
        for rows in table.tile_rows:
            rows.settle()
            rows.about_to_write()  # the memory is replaced
        moving = self._moving()
        if not moving:
            return None
        first = moving[0]
        leaves = [rows.leaf for rows in moving]

        def source(name: tuple[Any, ...], tensors: Sequence[Tensor], cells: bool) -> None:
            self._sources[name] = [tensor.detach() for tensor in tensors]
            trailing = () if cells else tuple(tensors[0].shape[1:])
            kinds[name] = SourceKind(cells, tensors[0].dtype, trailing)

        source(("weight",), leaves, True)
        for slot in first.state:
            values = [rows.state[slot] for rows in moving]
            if values[0].dim():
                source(("slot", slot), values, values[0].dim() == 2)
            else:
                numbers[("slot", slot)] = values[0].to("cpu", copy=True)  # `bind` moves it to its device
        grads = [leaf.grad for leaf in leaves]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            raise ConfigError(
                f"reshard: table {self.key} has a sparse .grad, which cannot move. Step, and set it to None."
            )
        if any(grad is not None for grad in grads):
            dense = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
            source(("grad",), dense, True)
        if all(rows.touched is not None for rows in moving):
            source(("touched",), [cast(ChangedRows, rows.touched).marks for rows in moving], False)
            counted = cast(ChangedRows, first.touched)
            numbers[("updates",)], numbers[("state updates",)] = counted.updates, counted.state_updates
        for number in self._steppers.of(self.key):
            held = self._steppers.held(number, self.key)
            for key, values in held.cells.items():
                source(("state", number, key), values, True)
            for key, values in held.rows.items():
                self._check_rows_of(number, key)
                source(("state", number, key), values, False)
            for key, value in held.numbers.items():
                numbers[("state", number, key)] = value
        for number, state in enumerate(self._row_states()):
            for key, own in state.parts().items():
                source(("rows", number, key), own, False)
        return TableFacts(kinds, numbers)

    def _moving(self) -> list[TileRows]:
        """Return the rows of this rank's tiles, without a head; empty if it holds none."""
        held = zip(self.table.tile_rows, self.table.tiles, strict=False)
        return [rows for rows, _ in held if rows.names is None]

    @property
    def _stays(self) -> bool:
        """True if only the head changes."""
        return self.old.bare == self.new.bare

    def _row_states(self) -> list[RowState]:
        return list(vars(self.table).get("row_states", ()))

    def _check_rows_of(self, number: int, key: str) -> None:
        for tiling, when in ((self.old, "is"), (self.new, "will be")):
            if any(block.c0 for block in tiling.blocks):
                raise ConfigError(
                    f"reshard: the state '{key}' that {self._steppers.word(number)} keeps of table {self.key} is a "
                    f"number per row, and the table {when} cut by columns, so each block has its own. "
                    "Attach the optimizer (apply_optimizer_in_backward), or cut the table by rows."
                )

    def settle(self, facts_by_rank: Sequence[TableFacts | None]) -> None:
        """Compare the facts of all ranks and make the load.

        Args:
            facts_by_rank: facts of each rank; None for ranks without a tile.

        Raises:
            ConfigError: ranks that hold tiles differ in the names, dtypes or shapes of their sources.
        """
        holders = [(rank, facts) for rank, facts in enumerate(facts_by_rank) if facts is not None]
        rank, ready = holders[0]
        kinds = dict(ready.kinds)
        for other, facts in holders[1:]:
            # Gradients may exist on some ranks only; those of other ranks are zero.
            kinds.update({name: kind for name, kind in facts.kinds.items() if name == ("grad",)})
            differ = (set(facts.kinds) ^ set(kinds)) - {("grad",)} or set(facts.numbers) ^ set(ready.numbers)
            if differ:
                name = sorted(differ, key=str)[0]
                has = name in facts.kinds or name in facts.numbers
                raise ConfigError(
                    f"reshard: {self._word(name)} of table {self.key} exists on rank {other if has else rank} and not "
                    f"on rank {rank if has else other}. Take a step on all ranks, or call init_state()."
                )
            for name, kind in facts.kinds.items():
                known = kinds[name]
                if kind.dtype != known.dtype or (kind.cells == known.cells and kind.trailing != known.trailing):
                    raise ConfigError(
                        f"reshard: {self._word(name)} of table {self.key} is {_kind_word(known)} on rank {rank} and "
                        f"{_kind_word(kind)} on rank {other}. Convert the model on all ranks alike."
                    )
                if kind.cells != known.cells:  # on tiles of one column, numbers per row look like cells
                    kinds[name] = kind if not kind.cells else known
        self._ready = TableFacts(kinds, ready.numbers)
        meta = self.table.weight.is_meta
        parts = [
            TensorTransfer(str(name), kind.cells, kind.unit, self._sources.get(name, []))
            for name, kind in ({} if meta or self._stays else kinds).items()
        ]
        self.load = TableTransfer(self.old.bare, self.new.bare, parts, self._topology)

    def _word(self, name: tuple[Any, ...]) -> str:
        if name[0] == "state":
            return f"state '{name[2]}' of {self._steppers.word(name[1])}"
        return " ".join(map(str, name))

    # ------------------------------------------------------------------------------------------------------ switch

    def allocate(self) -> None:
        """Allocate the memory of the new tiles."""
        assert self._ready is not None
        moving = self._moving()
        if ("grad",) in self._ready.kinds and ("grad",) not in self._sources and moving:
            self._sources[("grad",)] = [torch.zeros_like(rows.leaf) for rows in moving]
            for part, name in zip(self.load.parts, self._ready.kinds, strict=False):
                if name == ("grad",):
                    part.before = self._sources[name]
        places = tiles_or_empty(self.new.bare, self._group.rank)
        device, cache = self.table.home, self.table.cache
        folder = None if cache is None else cache.folder
        head_device = device if cache is None or cache.device is None else cache.device
        if folder is not None and not (self._stays and moving):
            self._allocate_files(folder, places)
        for name, kind in self._ready.kinds.items():
            if self.new.head is not None and name[0] in ("weight", "slot"):
                shape = (len(self.new.head.hot), *((self.new.dim,) if kind.cells else kind.trailing))
                self._heads[name] = torch.empty(shape, dtype=kind.dtype, device=head_device)
            if self._stays and moving:
                self._memory[name] = list(self._sources[name])
                continue
            if name in self._memory:
                continue
            if kind.cells:  # large tensors get huge pages, which makes new memory several times faster
                shapes = [(place.rectangle.rows, place.rectangle.width) for place in places]
                self._memory[name] = flat_memory(shapes, kind.dtype, device)
                continue
            self._memory[name] = [
                torch.empty(_shape_of(place, kind), dtype=kind.dtype, device=device) for place in places
            ]
        self._allocate_fill()
        held = bool(places[0].owners)
        for part, name in zip(self.load.parts, self._ready.kinds, strict=False):
            part.after = self._memory[name] if held else []

    def _allocate_files(self, folder: str, places: Sequence[Tile]) -> None:
        """Allocate the rows and slots of the new tiles in files."""
        assert self._ready is not None
        kinds = {name: kind for name, kind in self._ready.kinds.items() if name[0] in ("weight", "slot")}
        self._memory.update({name: [] for name in kinds})
        for place in places:
            fields = [RowField(_shape_of(place, kind)[1:], kind.dtype) for kind in kinds.values()]
            made = tensors_in_file(folder, place.r1 - place.r0, fields, self.table.config.name)
            for name, tensor in zip(kinds, made, strict=True):
                self._memory[name].append(tensor)

    def drop(self) -> None:
        """Free the new memory. The table keeps its old tiles."""
        self._memory, self._heads, self._fill, self._made = {}, {}, None, None
        for part in self.load.parts:
            part.after = []

    def _allocate_fill(self) -> None:
        """Allocate the messages that fill the new head."""
        if self.new.head is None or self.table.weight.is_meta:
            return
        assert self._ready is not None
        before = next((rows for rows in self.table.tile_rows if rows.names is not None), None)
        tiles = tiles_or_empty(self.new.bare, self._group.rank)
        tiles = tiles if tiles[0].owners else ()
        self._fill = HeadFill(self.new.head.hot.ids, self._old_ids())
        for name, head in self._heads.items():
            old = None
            if before is not None:
                old = before.leaf.detach() if name == ("weight",) else before.state[name[1]]
            kind, names = self._ready.kinds[name], [None] * len(tiles)
            rows = logical_tensor(self.new.bare, tiles, names, self._memory[name], kind.cells, self._group)
            self._fill.add(head, old, rows)

    def fill_head(self) -> None:
        """Fill the new head. Collective. The new tiles have their values; see `HeadFill.run`."""
        if self._fill is not None:
            self._fill.run()

    def _old_ids(self) -> npt.NDArray[np.int64]:
        return np.empty(0, dtype=np.int64) if self.old.head is None else self.old.head.hot.ids

    def head_bytes(self) -> int:
        """Return the bytes that all ranks send to fill the new head."""
        if self.new.head is None or self._ready is None:
            return 0
        fresh = np.setdiff1d(self.new.head.hot.ids, self._old_ids())
        found, ranks = 0, self._group.size
        for tile in rectangles(self.new.bare):
            count = int(np.searchsorted(fresh, tile.r1) - np.searchsorted(fresh, tile.r0))
            units = sum(
                kind.unit * (tile.c1 - tile.c0 if kind.cells else tile.c0 == 0)
                for name, kind in self._ready.kinds.items()
                if name[0] in ("weight", "slot")
            )
            found += count * units * (ranks - len(tile.owners))
        return found

    @property
    def _group(self) -> Group:
        return self.table.tile_rows[0].peers.group

    def _placed(self, name: tuple[Any, ...]) -> list[Tensor]:
        """Return the memory of the new tiles, the head among them."""
        own = iter(self._memory[name])
        return [next(own) if names_of(self.new, place) is None else self._heads[name] for place in self._places()]

    def _places(self) -> tuple[Tile, ...]:
        return tiles_or_empty(self.new, self._group.rank)

    def make_ready(self) -> None:
        """Build all objects that the switch puts in place. Operations that can fail are here, not in `switch`."""
        assert self._ready is not None
        table, kinds, numbers = self.table, self._ready.kinds, self._ready.numbers
        places = self._places()
        count = range(len(places))
        slots = {slot: self._placed(("slot", slot)) for slot in table.rows.state if ("slot", slot) in kinds}
        states: list[dict[str, Tensor]] = [
            {
                slot: slots[slot][i] if ("slot", slot) in kinds else numbers[("slot", slot)].clone()
                for slot in table.rows.state
            }
            for i in count
        ]
        touched: list[ChangedRows | None] = [None for _ in count]
        if table.tile_rows[0].touched is not None:
            marks = iter(self._memory.get(("touched",), ()))
            touched = [  # replicas were made equal before copies of hot rows move
                self._touched(place.r1 - place.r0, next(marks, None) if names_of(self.new, place) is None else None)
                for place in places
            ]
        steppers = {
            n: [self._state_of(n, i) for i in count]
            for n in self._steppers.of(self.key)
            if any(name[:2] == ("state", n) for name in (*kinds, *numbers))
        }
        peers = [new_peers(table, self.new, place, self._topology) for place in places]
        self._made = NewTiles(peers, states, touched, steppers)

    def _touched(self, rows: int, marks: Tensor | None) -> ChangedRows:
        assert self._ready is not None
        numbers = self._ready.numbers
        if marks is None:
            marks = torch.zeros(rows, dtype=torch.uint8, device=ChangedRows(0, self.table.home).marks.device)
        return ChangedRows.of(marks, numbers[("updates",)], numbers[("state updates",)])

    def switch(self) -> Exception | None:
        """Replace the old tiles by the new ones on this rank, by assignments alone.

        Returns:
            The first error that an optimizer or a `RowState` raised, or None. The table has moved in either case.
        """
        assert self._made is not None
        table, made = self.table, self._made
        grads: list[Tensor | None] = [None] * len(made.peers)
        if ("grad",) in self._memory:
            own_grads = iter(self._memory[("grad",)])
            grads = [next(own_grads) if names_of(self.new, place) is None else None for place in self._places()]
        before = table.leaves()
        after = replace_tiles(
            table,
            self.new,
            made.peers,
            self._placed(("weight",)),
            made.states,
            grads,
            made.touched,
        )
        first_error: Exception | None = None
        try:
            self._steppers.follow(self.key, before, after, made.steppers)
        except Exception as error:
            first_error = error
        held = bool(self.table.tiles)
        for number, state in enumerate(self._row_states()):
            own = {name[2]: parts for name, parts in self._memory.items() if name[:2] == ("rows", number)}
            try:
                state.take({key: parts if held else [] for key, parts in own.items()})
            except Exception as error:
                first_error = first_error or error
        self._memory, self._heads, self._fill, self._sources, self._made = {}, {}, None, {}, None
        for part in self.load.parts:
            part.before, part.after = [], []
        return first_error

    def _state_of(self, number: int, i: int) -> dict[str, Any]:
        assert self._ready is not None
        kinds, numbers = self._ready.kinds, self._ready.numbers
        state: dict[str, Any] = {
            name[2]: number_like(value, self.table.weight)
            for name, value in numbers.items()
            if name[:2] == ("state", number)
        }
        state.update({name[2]: self._memory[name][i] for name in kinds if name[:2] == ("state", number)})
        return state


def _shape_of(place: Tile, kind: SourceKind) -> tuple[int, ...]:
    rectangle = place.rectangle
    return (rectangle.rows, rectangle.width) if kind.cells else (rectangle.rows, *kind.trailing)


def _kind_word(kind: SourceKind) -> str:
    return f"{kind.dtype} {list(kind.trailing)} a row" if kind.trailing else str(kind.dtype)
