"""`ShardedTable`: a rank's tiles of one table, one leaf each, under the unsharded table's name.

Nouns
  head    copies of the table's hot rows, on every rank, in a leaf of their own (`head_rows.py`): a tile without a place
          in the table
  tile    a rectangle of the table that this rank holds: leaf `<table>.weight`, further ones `weight.1`, `weight.2` …
          in column-then-row order. A rank without tiles has an empty leaf `[0, dim]`, so that every rank has
          `<table>.weight`
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.initial_values import fill_initial
from tilerec.modules.table import Table, empties_memory
from tilerec.optim.sharded_state import TiledTable
from tilerec.sharding.head_rows import HotCopies, names_of
from tilerec.sharding.layout import reader, rectangles
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.state import Cover, LogicalTensor, Piece, copy_into, load, shown, size_mismatch
from tilerec.sharding.update import TileRows, UpdatePeers
from tilerec.spec.tile import Tile, Tiling
from tilerec.spec.topology import Topology
from tilerec.storage.table_rows import TableRows, TilePosition, rows_of
from tilerec.torch_private import exclude_from_fsdp, load_state_dict_pre_hooks

COLLECTIONS_OF: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""By sharded table, the collections that hold it."""


class ShardedTable(Table, TiledTable):
    """A rank's tiles of a table. `shard_table` converts a `Table` in place."""

    tiling: Tiling
    tiles: tuple[Tile, ...]  # this rank's
    tile_rows: list[TileRows]  # one per leaf: of each tile, or of the empty leaf
    leaf_names: tuple[str, ...]  # one per leaf

    def leaves(self) -> list[nn.Parameter]:
        """Return the leaves, in the order of the tiles."""
        held: list[nn.Parameter] = list(map(self._parameters.__getitem__, self.leaf_names))  # type: ignore[arg-type]
        return held

    @property
    def home(self) -> torch.device:
        """Device of the tiles, on every rank alike: copies of hot rows of a cached table may be on another one."""
        device = self.rows.leaf.device
        return device if self.cache is None or device.type == "meta" else torch.device("cpu")

    def training_changed(self) -> None:
        """Have compiled programs of the collections of this table be compiled again."""
        for collection in COLLECTIONS_OF.get(self, ()):
            collection.traced_settings += 1

    def place_of(self, i: int) -> Tile:
        """Return the rectangle of leaf i; it has no rows for the empty leaf."""
        return self.tiles[i] if self.tiles else Tile(0, 0, 0, self.tiling.dim, ())

    def _all_rows(self) -> list[TableRows]:
        return list(self.tile_rows)

    def reset_parameters(self) -> None:
        """Write the initial values: the same as in the whole table. Collective for a table with hot rows."""
        self._about_to_write()
        for rows, leaf, tile in zip(self.tile_rows, self.leaves(), self.tiles, strict=False):
            if not leaf.is_meta and rows.names is None:
                fill_initial(leaf, self.config, self.rows.place.key, tile.r0, tile.c0)
        if not self.weight.is_meta:
            self.weight_of().fill_copies()

    def _about_to_write(self) -> None:
        self.settle()
        for rows in self.tile_rows:
            rows.about_to_write()

    def _check(self, weight: nn.Parameter) -> None:
        tile = self.place_of(0)
        want = (tile.r1 - tile.r0, tile.c1 - tile.c0)
        if tuple(weight.shape) != want:
            raise ConfigError(
                f"Table '{self.config.name}' is sharded: got a weight of shape {tuple(weight.shape)}; expected {want}, "
                "this rank's tile. Load whole tables with load_state_dict."
            )

    def _bind(self) -> None:
        """Bind the `tile_rows` to the current leaves; for a leaf of another table, share that table's rows."""
        for i, leaf in enumerate(self.leaves()):
            theirs = rows_of(leaf)
            if isinstance(theirs, TileRows) and theirs is not self.tile_rows[i]:
                self._check_tie(theirs, i)
                self.tile_rows[i].holders.discard(self)
                self.tile_rows[i] = theirs
                self.tied = True
            rows = self.tile_rows[i]
            rows.holders.add(self)
            for holder in rows.holders:
                holder._parameters[leaf_name(i)] = leaf
            rows.bind(leaf)
            if i:
                # torch's checkpoint helpers resolve a parameter's name attribute by attribute.
                setattr(self.weight, str(i), leaf)
        self.rows = self.tile_rows[0]

    def _check_tie(self, theirs: TileRows, i: int) -> None:
        other = next(iter(theirs.holders))
        if not isinstance(other, ShardedTable) or other.tiling != self.tiling or other.leaves()[i] is not theirs.leaf:
            raise ConfigError(
                f"Table '{self.config.name}': got a tile of table '{theirs.name}', which is cut differently; tie "
                "tables before sharding them, or give both the same tiling."
            )

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedTable:
        leaves = self.leaves()
        if any(rows.leaf is not leaf for rows, leaf in zip(self.tile_rows, leaves, strict=True)):
            for i, rows in enumerate(self.tile_rows):
                self._parameters[leaf_name(i)] = rows.leaf  # a table tied to this one was converted before it
            return self
        for rows in self.tile_rows:
            rows.about_to_write()  # a conversion to another precision changes values
        if not self._move_cache(fn):
            nn.Module._apply(self, fn, recurse)
        self._bind()
        if empties_memory(fn):
            self.reset_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._bind()

    # ------------------------------------------------------------------------------------------------------- state

    def weight_of(self) -> LogicalTensor:
        """Return the weight as a logical tensor."""
        return self._logical([leaf.detach() for leaf in self.leaves()])

    def state_of(self, name: str) -> LogicalTensor:
        """Return one slot of the attached optimizer's state (or its update count) as a logical tensor."""
        return self._logical([rows.state[name] for rows in self.tile_rows])

    def _logical(self, parts: Sequence[Tensor]) -> LogicalTensor:
        """Return the logical tensor of one part per leaf.

        Args:
            parts: each of the leaf's shape, `[rows]`, `[rows, 1]`, or a number.
        """
        for rows in self.tile_rows:
            rows.settle()
        cells = parts[0].dim() == 2 and parts[0].shape == self.leaves()[0].shape
        names = [rows.names for rows in self.tile_rows]
        return logical_tensor(self.tiling, self.tiles, names, parts, cells, self.tile_rows[0].peers.group)

    # ------------------------------------------------------------------------------- optimizers that are not attached

    def shape_of(self, parts: Sequence[Tensor], what: str) -> tuple[int, ...]:
        """See `TiledTable`. Accepts a number per row only if no row is split by columns."""
        first = parts[0]
        if self._whole_everywhere():
            return tuple(first.shape)  # any shape: every rank has the whole
        leaves = self.leaves()
        if all(part.dim() == 0 for part in parts):
            return ()
        if all(part.shape == leaf.shape for part, leaf in zip(parts, leaves, strict=True)):
            return (self.tiling.rows, self.tiling.dim)
        ones = (1,) * (first.dim() - 1)
        if not all(tuple(p.shape) == (leaf.shape[0], *ones) for p, leaf in zip(parts, leaves, strict=True)):
            raise ConfigError(
                f"{what} has shape {tuple(first.shape)} beside a tile of shape {tuple(leaves[0].shape)}; expected the "
                "tile's shape, a number per row, or one number, as the shape for the whole table is otherwise "
                "unknown. Attach the optimizer (apply_optimizer_in_backward), or use an element-wise one."
            )
        if self.tile_rows[0].spec is None and any(tile.c0 for tile in rectangles(self.tiling)):
            raise ConfigError(
                f"{what} is a number per row, and table '{self.config.name}' is cut by columns, so each block has its "
                "own number, of its columns only; attach the optimizer (apply_optimizer_in_backward), or cut the table "
                "by rows."
            )
        return (self.tiling.rows, *ones)

    def show(self, parts: Sequence[Tensor]) -> Tensor:
        """See `TiledTable`."""
        return parts[0] if self._whole_everywhere() else shown(self._logical(parts))

    def take(self, parts: Sequence[Tensor], value: Tensor) -> None:
        """See `TiledTable`."""
        if self._whole_everywhere() and type(value) in (Tensor, nn.Parameter):
            with torch.no_grad():
                parts[0].copy_(value)
        else:
            load(self._logical(parts), value)

    def counts(self, leaf: int) -> bool:
        """See `TiledTable`. True on the lowest owner."""
        return self.place_of(leaf).owners[:1] == (self._group.rank,)

    @property
    def ranks(self) -> Group:
        """See `TiledTable`."""
        return self._group

    def of_all_ranks(self, values: Tensor) -> Tensor:
        """See `TiledTable`."""
        group, count = self._group, values.numel()
        sent = values.detach().to(group.device).repeat(group.size)
        sizes = [count] * group.size
        received = group.all_to_all("gradient norms", torch.zeros_like(sent), sent, sizes, sizes).wait()
        return received.to(values.device).view(group.size, count)

    @contextmanager
    def on_all_ranks(self, what: str, step: str) -> Iterator[None]:
        """See `TiledTable`. Covers the ranks of all teams if teams train apart."""
        teams = self.tile_rows[0].peers.teams
        with ExitStack() as blocks:
            if teams is not None and teams.apart:
                elsewhere = f"{step}, in another sharding group,"
                blocks.enter_context(on_all_ranks(teams.axis, what, elsewhere, teams.replica_names or None))
            names = None if teams is None else teams.names or None
            blocks.enter_context(on_all_ranks(self._group, what, step, names))
            yield

    @property
    def _group(self) -> Group:
        return self.tile_rows[0].peers.group

    def _whole_everywhere(self) -> bool:
        tiles = rectangles(self.tiling)
        return len(tiles) == 1 and len(tiles[0].owners) == self._group.size

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        whole = self.weight_of()
        kept = keep_vars and whole.cover.whole_on(whole.group.size)
        destination[f"{prefix}weight"] = self.weight if kept else shown(whole)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load one key of logical shape: a whole tensor, a DTensor, or tiles of another tiling.

        Values are copied, even with `assign=True`.
        """
        for hook in load_state_dict_pre_hooks(self).values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        key = f"{prefix}weight"
        if strict:
            unexpected_keys.extend(name for name in state_dict if name.startswith(prefix) and name != key)
        value = state_dict.get(key)
        if value is None:
            if strict:
                missing_keys.append(key)
            return
        want = (self.config.num_embeddings, self.config.embedding_dim)
        if not isinstance(value, Tensor):
            error_msgs.append(
                f"While copying the parameter named {key!r}, expected torch.Tensor or Tensor-like object from "
                f"checkpoint but received {type(value)}."
            )
        elif tuple(value.shape) != want:
            error_msgs.append(size_mismatch(key, value.shape, want))
        else:
            self._about_to_write()
            load(self.weight_of(), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTable:
        self.settle()
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickle.PicklingError(
            f"Table '{self.config.name}' is sharded: a pickled module would hold this rank's tiles only, without "
            "access to the other ranks. Save module.state_dict() with torch.distributed.checkpoint, or "
            "tilerec.parallel.full_state_dict(module) with torch.save; load it into a module that was built and "
            "sharded anew."
        )

    def extra_repr(self) -> str:
        held = ", ".join(str(tile.rectangle) for tile in self.tiles) or "nothing"
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}, dtype={self.weight.dtype}, here: {held}"


def logical_tensor(
    tiling: Tiling, tiles: Sequence[Tile], names: Sequence[Tensor | None], parts: Sequence[Tensor], cells: bool,
    group: Group,
) -> LogicalTensor:  # fmt: skip
    """Return the logical tensor of a rank's tiles; see `ShardedTable._logical` for `parts`.

    Args:
        tiles: this rank's, maybe none.
        names: per part, the rows of a head; None: another tile.
        cells: parts have the shape of their leaf.
    """
    if cells:
        cover = Cover.of_cells((tiling.rows, tiling.dim), rectangles(tiling.bare))
    elif parts[0].dim():
        cover = Cover.of_rows(tiling.rows, rectangles(tiling.bare), column=parts[0].dim() == 2)
    else:
        cover = Cover.of_one(rectangles(tiling))
    place = {(t.r0, t.r1, t.c0): i for i, t in enumerate(cover.tiles)}
    pieces, copies = [], None
    for tile, hot, part in zip(tiles, names, parts, strict=False):
        if hot is not None and part.dim():
            copies = HotCopies(hot, part)
            continue
        key = (tile.r0, tile.r1, tile.c0 if cells else 0) if part.dim() else (0, 1, 0)
        pieces.append(Piece(place[key], part))
    return LogicalTensor(cover, tuple(pieces), group, parts[0].new_empty(0), copies)


def leaf_name(i: int) -> str:
    """Return the name of leaf i of a table."""
    return f"weight.{i}" if i else "weight"


def check_rule(table: Table, tiling: Tiling) -> None:
    """Check that the attached optimizer can sum over whole rows under a tiling.

    Raises:
        ConfigError: it needs such sums, and the column blocks of some row are cut at different rows.
    """
    spec = table.rows.spec
    if spec is None or not spec.phases:
        return
    widths: dict[tuple[int, int], int] = {}
    for tile in rectangles(tiling):
        widths[(tile.r0, tile.r1)] = widths.get((tile.r0, tile.r1), 0) + tile.c1 - tile.c0
    for (r0, r1), width in widths.items():
        if width != tiling.dim:
            raise ConfigError(
                f"Table '{table.config.name}': {type(spec).__name__} needs sums over whole rows, and of rows [{r0}, "
                f"{r1}) only {width} of {tiling.dim} columns are cut at these rows; cut all column blocks at the same "
                "rows, or use an optimizer that works element by element (SGD, Adagrad, Adam)."
            )


def tiles_or_empty(tiling: Tiling, rank: int) -> tuple[Tile, ...]:
    """Return a rank's tiles; a single empty tile if it has none."""
    own = tuple(tile for tile in rectangles(tiling) if rank in tile.owners)
    return own or (Tile(0, 0, 0, tiling.dim, ()),)


def peers_of(
    tiling: Tiling, tile: Tile, group: Group, topology: Topology, exact: bool, teams: ReplicaGroups | None = None
) -> UpdatePeers:  # fmt: skip
    """Return the ranks that take part in a tile's updates; see `UpdatePeers`. An empty tile has no owners."""
    if not tile.owners:
        return UpdatePeers(group, (group.rank,), ((group.rank, 0, tiling.dim),), (), exact, teams)
    me, team_of = group.rank, None if teams is None else teams.of
    beside = sorted(
        (other for other in rectangles(tiling) if (other.r0, other.r1) == (tile.r0, tile.r1)),
        key=lambda t: t.c0,
    )
    if sum(other.c1 - other.c0 for other in beside) != tiling.dim:
        return UpdatePeers(group, tile.owners, None, (), exact, teams)
    columns = []
    listeners: dict[int, None] = {}
    for other in beside:
        columns.append((reader(other.owners, me, topology, team_of), other.c0, other.c1 - other.c0))
        if other != tile:
            mine = (q for q in other.owners if reader(tile.owners, q, topology, team_of) == me)
            listeners.update(dict.fromkeys(mine))
    listeners.pop(me, None)
    return UpdatePeers(group, tile.owners, tuple(columns), tuple(listeners), exact, teams)


@torch.no_grad()
def shard_table(
    table: Table, tiling: Tiling, group: Group, topology: Topology, memory: Sequence[Tensor], exact: bool,
    teams: ReplicaGroups | None = None, *, written: bool = False,
) -> None:  # fmt: skip
    """Convert a table into this rank's tiles of it, in place, with their values and optimizer state.

    Tables tied to it (tables of other collections that share its rows) are converted to the same tiles.

    Args:
        table: the whole table, real or on meta.
        memory: memory `[rows, width]` for each of this rank's rectangles of the tiling, not written yet; one empty
            `[0, dim]` if this rank has none.
        teams: set if the ranks form several teams; None: one team.
        written: `memory` holds the values already.
    """
    whole, old = table.weight, table.rows
    places = tiles_or_empty(tiling, group.rank)
    tiles = tuple(tile for tile in places if tile.owners)
    made: list[TileRows] = []
    for tile, own in zip(places, memory, strict=True):
        names = names_of(tiling, tile)
        if not own.is_meta and own.numel() and not written:
            if whole.is_meta:
                if names is None:  # the caller fills copies
                    fill_initial(own, table.config, old.place.key, tile.r0, tile.c0)
            elif names is not None:
                own.copy_(whole[names.to(whole.device)])
            else:
                copy_into(own, whole[tile.r0 : tile.r1, tile.c0 : tile.c1])
        leaf = nn.Parameter(own.data, requires_grad=whole.requires_grad)  # has its own version counter
        peers = peers_of(tiling, tile, group, topology, exact, teams)
        rows = TileRows(table.config.name, TilePosition(old.place.key, tile.r0, tile.c0), peers, tiling.dim)
        rows.takes_gradients, rows.origin, rows.names = old.takes_gradients, old.handle, names
        rows.bind(leaf)
        if old.spec is not None and old.group is not None:
            rows.attach(old.spec, old.group)
            _copy_state(old, rows, tile)
        made.append(rows)
    for holder in list(old.holders):  # all tables that share these rows
        assert isinstance(holder, Table)
        holder.__class__ = ShardedTable
        sharded = cast(ShardedTable, holder)
        sharded._parameters.pop("weight", None)
        for i, rows in enumerate(made):
            sharded._parameters[leaf_name(i)] = rows.leaf
        sharded.tiling, sharded.tiles, sharded.tile_rows = tiling, tiles, list(made)
        sharded.leaf_names = tuple(leaf_name(i) for i in range(len(made)))
        sharded.rows = made[0]
        sharded._bind()
        exclude_from_fsdp(sharded)  # it would cut each rank's tile as if all ranks had the same rows


def _copy_state(old: TableRows, new: TileRows, tile: Tile) -> None:
    for name, value in new.state.items():
        before = old.state[name]
        if before.is_meta:
            continue
        if new.names is not None and before.dim():
            value.copy_(before[new.names.to(before.device)])
            continue
        if before.dim() == 2:
            before = before[tile.r0 : tile.r1, tile.c0 : tile.c1]
        elif before.dim() == 1:
            before = before[tile.r0 : tile.r1]
        copy_into(value, before)
