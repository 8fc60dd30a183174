"""Tiles of a sharded table at another number of rows: built beside the old tiles, then switched at once.

The state of a tile moves with its rows: slots of attached and other optimizers, `.grad`, `RowState`s, and marks of rows
that replicas have touched. All other rows get initial values, and state as before the first step. Copies of hot rows
follow the ids of their rows; those whose ids are dropped end.

Legend: M rows that move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.modules.initial_values import fill_initial
from tilerec.parallel.resharding.external_optimizers import ExternalOptimizers, number_like
from tilerec.sharding.changed_rows import ChangedRows
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.head_rows import is_head
from tilerec.sharding.retile import RowState, new_peers, replace_tiles
from tilerec.sharding.table import ShardedTable, tiles_or_empty
from tilerec.spec.tile import Tile, Tiling
from tilerec.storage.flat_storage import flat_memory


class ResizedTable:
    """The new tiles of a table and their state; the constructor builds them, `switch` puts them in place.

    Args:
        collection: the collection of the table.
        tiling: the current tiles, with other numbers of rows.
        old_rows_M, new_rows_M: old and new row numbers of the moving rows in this rank's tiles.
        steppers: the user's own optimizers that step the table, if none is attached.
        name: the table's name in `steppers`.
        hot_moves: old and new row numbers of the hot rows that stay hot; None without hot rows.

    Raises:
        ConfigError: some state of the tiles cannot follow.
    """

    @torch.no_grad()
    def __init__(
        self, collection: ShardedCollection, table: ShardedTable, tiling: Tiling, old_rows_M: Tensor,
        new_rows_M: Tensor, steppers: ExternalOptimizers, name: str, hot_moves: tuple[Tensor, Tensor] | None,
    ) -> None:  # fmt: skip
        self._collection, self._table, self._tiling = collection, table, tiling
        self._steppers, self._name = steppers, name
        self._config = replace(table.config, num_embeddings=tiling.rows)
        rank, topology = table.tile_rows[0].peers.group.rank, collection.exchange.topology
        places = tiles_or_empty(tiling, rank)
        for rows in table.tile_rows:
            rows.settle()
            rows.about_to_write()  # the memory is replaced
        self._from, self._homes = _sources(table, tiling, places), _homes(tiling, places)
        self._moves = [
            _moves(table.place_of(source), place, old_rows_M, new_rows_M)
            if i in self._homes
            else _head_moves(table.tiling, tiling, hot_moves)
            for i, (source, place) in enumerate(zip(self._from, places, strict=True))
        ]
        self._shapes = [(place.r1 - place.r0, place.c1 - place.c0) for place in places]
        self._peers = [new_peers(table, tiling, place, topology) for place in places]
        leaves = table.leaves()
        own = iter(flat_memory([self._shapes[i] for i in self._homes], leaves[0].dtype, table.home))
        self._memory = [
            next(own) if i in self._homes else leaves[source].new_empty(self._shapes[i])
            for i, source in enumerate(self._from)
        ]
        for i, (made, place) in enumerate(zip(self._memory, places, strict=True)):
            if not made.is_meta and made.numel():
                if i in self._homes:
                    fill_initial(made, self._config, table.rows.place.key, place.r0, place.c0)
                self._move(i, leaves[self._from[i]].detach(), made)
        self._states = [self._slots(i) for i in range(len(places))]
        self._grads = [self._grad(i, leaves[source].grad) for i, source in enumerate(self._from)]
        self._touched = [table.tile_rows[source].touched for source in self._from]
        self._marks = [
            None if touched is None else self._with_moved_rows(i, touched.marks, 0)
            for i, touched in enumerate(self._touched)
        ]
        self._states_by_stepper = {number: self._stepper_states(number) for number in steppers.of(name)}
        self._row_states = [
            (state, {key: self._parts_with_moved_rows(own) for key, own in state.parts().items()})
            for state in _row_states(table)
        ]
        layouts = [
            replace(layout, tiling=tiling) if layout.name == self._config.name else layout
            for layout in collection.exchange.layout.tables
        ]
        self._exchange = collection.exchange.over(topology, layouts)

    def _move(self, i: int, old: Tensor, made: Tensor) -> None:
        source, target = self._moves[i]
        made[target.to(made.device)] = old[source.to(old.device)]

    def _with_moved_rows(self, i: int, old: Tensor, fill: float) -> Tensor:
        made = old.new_full((self._shapes[i][0], *old.shape[1:]), fill)
        if not made.is_meta:
            self._move(i, old, made)
        return made

    def _parts_with_moved_rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [self._with_moved_rows(i, part, 0) for i, part in zip(self._homes, parts, strict=False)]

    def _slots(self, i: int) -> dict[str, Tensor]:
        """Return the optimizer slots of a new tile. Counts are unchanged."""
        rows = self._table.tile_rows[self._from[i]]
        inits = {} if rows.spec is None else {slot.name: slot.init for slot in rows.spec.slots}
        return {
            name: self._with_moved_rows(i, value, inits[name]) if name in inits and value.dim() else value
            for name, value in rows.state.items()
        }

    def _grad(self, i: int, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"Table '{self._config.name}' has a sparse .grad, which cannot follow its rows. Step, and set it to "
                "None."
            )
        return self._with_moved_rows(i, grad, 0)

    def _stepper_states(self, number: int) -> list[dict[str, Any]]:
        """Return the state of one of the user's optimizers for each new tile."""
        held = self._steppers.held(number, self._name)
        made = []
        leaves = self._table.leaves()
        for i, source in enumerate(self._from):
            own = {key: number_like(value, leaves[source]) for key, value in held.numbers.items()}
            for key, values in (*held.cells.items(), *held.rows.items()):
                own[key] = self._with_moved_rows(i, values[source], self._steppers.initial(number, self._name, key))
            made.append(own)
        return made

    def switch(self) -> None:
        """Replace the old tiles by the new ones on this rank. Must not fail."""
        collection, table, config = self._collection, self._table, self._config
        before = table.leaves()
        touched = [
            None if marks is None or old is None else ChangedRows.of(marks, old.updates, old.state_updates)
            for marks, old in zip(self._marks, self._touched, strict=True)
        ]
        table.config = config
        after = replace_tiles(table, self._tiling, self._peers, self._memory, self._states, self._grads, touched)
        self._steppers.follow(
            self._name, before, after, {n: held for n, held in self._states_by_stepper.items() if any(held)}
        )
        self._steppers.refresh()
        for state, parts in self._row_states:
            state.take(parts)
        collection._replace_config(config)
        collection.exchange = self._exchange
        collection.exchange.enter()
        collection._renew_sinks()


def _homes(tiling: Tiling, places: Sequence[Tile]) -> list[int]:
    """Return the positions of new tiles that are no heads."""
    return [i for i, place in enumerate(places) if not is_head(tiling, place)]


def _sources(table: ShardedTable, tiling: Tiling, places: Sequence[Tile]) -> list[int]:
    """Return for each new tile the position of the old one whose rows it gets; of an empty tile any."""
    homes = iter([i for i, rows in enumerate(table.tile_rows) if rows.names is None])
    heads = iter([i for i, rows in enumerate(table.tile_rows) if rows.names is not None])
    return [next(heads) if is_head(tiling, place) else next(homes, 0) for place in places]


def _head_moves(old: Tiling, new: Tiling, hot_moves: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the positions of the moving hot rows in the old and in the new head."""
    assert old.head is not None
    assert new.head is not None
    assert hot_moves is not None
    before, after = (torch.from_numpy(head.hot.ids.copy()) for head in (old.head, new.head))
    return torch.searchsorted(before, hot_moves[0]), torch.searchsorted(after, hot_moves[1])


def _moves(old: Tile, new: Tile, old_rows_M: Tensor, new_rows_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the old and the new row numbers, relative to the tile, of the rows that move inside a tile."""
    inside = (old_rows_M >= old.r0) & (old_rows_M < old.r1)
    return old_rows_M[inside] - old.r0, new_rows_M[inside] - new.r0


def _row_states(table: ShardedTable) -> Sequence[RowState]:
    return list(vars(table).get("row_states", ()))
