"""The torch optimizers that step the tiles of a table, recorded at their first step.

A move of a table (`reshard`) takes along the state of the optimizers that it is given. This record detects the others:
before the move as far as they are known, and otherwise at their next step, which would read state of other cells.

Nouns
  stepper  an optimizer that has leaves of a sharded table without an attached optimizer among its parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.optim.sharded_state import TiledTable, tiled_table_of
from tilerec.storage.table_rows import rows_of


class TileSteppers:
    """The steppers of one table, as weak references."""

    def __init__(self) -> None:
        self._current: WeakSet[Optimizer] = WeakSet()  # their parameters and state fit the current tiles
        self._behind: WeakSet[Optimizer] = WeakSet()  # they stepped tiles that have moved without them
        self._moved = False

    def known(self) -> list[Optimizer]:
        """Return the optimizers that have stepped the current tiles, or moved with them."""
        return list(self._current)

    def follow(self, followers: Iterable[Optimizer]) -> None:
        """Record a move of the table, with the optimizers whose parameters and state have moved along."""
        followers = WeakSet(followers)
        self._behind = (self._behind | self._current) - followers
        self._current, self._moved = followers, True

    def record(self, optimizer: Optimizer, table: TiledTable, name: str, own: set[int]) -> None:
        """Record a stepper.

        Args:
            own: ids of the optimizer's parameters.

        Raises:
            ConfigError: the table has moved without the optimizer.
        """
        if optimizer in self._current:
            return
        if optimizer in self._behind:
            _refuse(optimizer, name, "it has stepped its former tiles")
        if self._moved:
            # First seen after a move: an optimizer that is older than the move may have loaded its state.
            state = vars(optimizer).get("state") or {}
            leaves = table.leaves()
            if any(state.get(leaf) for leaf in leaves):
                _refuse(optimizer, name, "it has state from before its first step")
            if any(leaf.numel() and id(leaf) not in own for leaf in leaves):
                _refuse(optimizer, name, "it lacks some of its tiles")
        self._current.add(optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> TileSteppers:
        return TileSteppers()  # a copied table has other leaves, which no optimizer steps yet


def steppers_of(table: TiledTable) -> TileSteppers:
    """Return the record of a table, which tables tied to it share."""
    rows = rows_of(table.leaves()[0])
    assert rows is not None
    holders = [vars(holder) for holder in rows.holders]
    found = next((own["_steppers"] for own in holders if "_steppers" in own), None) or TileSteppers()
    for own in holders:
        own["_steppers"] = found
    return found


def own_parameters(optimizer: Optimizer) -> Sequence[Tensor]:
    """Return the parameters that an optimizer holds itself; none for a wrapper that only delegates."""
    own = vars(optimizer)
    if "params" in own:  # a `KeyedOptimizer`
        return list(own["params"].values())
    # An optimizer that another thread is constructing has no param groups yet.
    return [p for group in own.get("param_groups", ()) for p in group["params"]]


def record_steppers(*optimizers: Optimizer) -> None:
    """Record the optimizers in the tables whose tiles they hold.

    Raises:
        ConfigError: a table has moved without an optimizer.
    """
    for optimizer in optimizers:
        params = own_parameters(optimizer)
        own = {id(p) for p in params}
        tables: dict[int, tuple[TiledTable, str]] = {}
        for p in params:
            rows, table = rows_of(p), tiled_table_of(p)
            if rows is not None and rows.spec is None and table is not None:
                tables[id(table.leaves()[0])] = table, rows.name
        for table, name in tables.values():
            steppers_of(table).record(optimizer, table, name, own)


def _refuse(optimizer: Optimizer, name: str, why: str) -> NoReturn:
    kind = type(optimizer).__name__
    raise ConfigError(
        f"{kind}: got table '{name}', which was resharded without this optimizer, and {why}; expected an optimizer in "
        "reshard(optimizers=[...]), or a new one without state. Pass it to every reshard, rebalance and resize_ids, or "
        "make it anew and load its state after its first step."
    )
