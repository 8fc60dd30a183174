"""Choice of a row type per table, by data: few bytes for little normalized entropy (NE).

  1. Each table alone is converted to each type, and the model is scored: what the type costs, in NE.
  2. Greedy: from all tables as trained, take the change of one table that saves the most bytes for its NE, until the
     budget is met, or the changes' NE add up to the limit.
  3. The chosen types together are scored. If they lose more than the limit, the last changes are taken back.

The loss of several tables is about the sum of theirs, since roundings are independent; step 3 does not rely on it. NE
that a type gains by chance is not spent on others.

Example: table a, 100 MB as trained: int8 saves 73 MB for 1e-6 of NE, int4 86 MB for 4e-5; b, 10 MB: int8 saves 7 MB for
2e-6. The order is a int8 (73 MB per 1e-6), b int8 (3.5), a int4 (13 MB more for 3.9e-5: 0.33).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tilerec.errors import ConfigError
from tilerec.quantized.row_type import ROW_TYPES, RowType
from tilerec.spec.byte_text import byte_text
from tilerec.train.table_conversion import TrainedTables

Score = Callable[[nn.Module], float]
"""Returns the normalized entropy of a model on held-out samples."""

_LEAST_LOSS = (
    1e-9  # relative NE: smaller losses and gains count as this much, so that their order is that of their bytes
)


@dataclass(frozen=True)
class TypeCost:
    """A row type of a table: its bytes, and the relative change of NE if only this table has it; None: not measured."""

    row_type: str
    bytes: int
    ne_change: float | None

    @property
    def loss(self) -> float:
        """The relative change of NE; 0 if it was not measured."""
        return self.ne_change or 0.0


@dataclass(frozen=True)
class TableCosts:
    """A table's row types, the first as trained. Tables of several collections with one name are one entry."""

    name: str
    rows: int
    dim: int
    types: tuple[TypeCost, ...]


@dataclass(frozen=True)
class TypeChoice:
    """Row types of all tables.

    Attributes:
        costs: of each table.
        types: by table.
        float_ne, ne: normalized entropy of the model as trained, and of the quantized one; None: not measured.
    """

    costs: tuple[TableCosts, ...]
    types: Mapping[str, str]
    float_ne: float | None = None
    ne: float | None = None

    @property
    def ne_change(self) -> float | None:
        """Relative change of NE; None if it was not measured."""
        return None if self.ne is None or self.float_ne is None else self.ne / self.float_ne - 1

    @property
    def bytes(self) -> int:
        """Bytes of all tables."""
        return sum(self.chosen(table).bytes for table in self.costs)

    @property
    def float_bytes(self) -> int:
        """Bytes of all tables as trained."""
        return sum(table.types[0].bytes for table in self.costs)

    def chosen(self, table: TableCosts) -> TypeCost:
        """Return a table's chosen type."""
        return next(cost for cost in table.types if cost.row_type == self.types[table.name])


def convert_all(tables: TrainedTables, row_type: RowType) -> TypeChoice:
    """Convert all tables to one type, without a measurement.

    Raises:
        InputError: a table cannot be quantized.
    """
    costs = []
    for name in tables.names:
        tables.convert(name, row_type)
        types = [TypeCost(own.name, tables.bytes(name, own), None) for own in (tables.trained_type(name), row_type)]
        costs.append(TableCosts(name, *tables.shape(name), tuple(dict.fromkeys(types))))
    return TypeChoice(tuple(costs), dict.fromkeys(tables.names, row_type.name))


def choose_types(
    tables: TrainedTables, score: Score, types: Sequence[RowType], budget: int | None, max_ne: float | None
) -> TypeChoice:
    """Choose a row type per table, and convert the tables of the model to them.

    Args:
        tables: of a model in evaluation mode; one at a time is converted and restored.
        score: returns the NE of a model.
        types: candidates, besides each table's own.
        budget: most bytes of all tables; None: as few as `max_ne` allows.
        max_ne: most relative increase of NE; None: any.

    Raises:
        ConfigError: the budget cannot be met within `max_ne`, or at all; or NE is undefined.
        InputError: a table cannot be quantized.
    """
    float_ne = score(tables.model)
    if not 0 < float_ne < float("inf"):
        raise ConfigError(
            f"normalized entropy: got {float_ne} on the held-out samples; expected a number above 0. Evaluate on "
            "samples with both labels."
        )
    if not tables.names:
        raise ConfigError(
            "tilerec quantize: got a model without tables; expected embedding tables. Train one with some."
        )
    costs = tuple(_costs(tables, name, types, lambda: score(tables.model) / float_ne - 1) for name in tables.names)
    changes = _changes(costs, budget, max_ne)
    while True:
        chosen = _after(costs, changes)
        for name, own in chosen.items():
            tables.convert(name, ROW_TYPES[own])
        ne = score(tables.model)
        if max_ne is None or ne / float_ne - 1 <= max_ne or not changes:
            return TypeChoice(costs, chosen, float_ne, ne)
        if budget is not None:
            raise ConfigError(
                f"--budget: got {byte_text(budget)} with --max-ne {max_ne:.4%}; expected limits that fit together. The "
                f"types for this budget raise NE by {ne / float_ne - 1:.4%}. Raise one of the two."
            )
        changes = changes[: len(changes) * 3 // 4]  # the last ones lose the most for their bytes


def _costs(tables: TrainedTables, name: str, types: Sequence[RowType], change: Callable[[], float]) -> TableCosts:
    """Measure each type of a table; `change` returns the relative change of NE with the rows as they are now."""
    trained = tables.trained_type(name)
    found = [TypeCost(trained.name, tables.bytes(name, trained), 0.0)]
    for row_type in sorted(types, key=lambda own: own.bits or 16, reverse=True):
        size = tables.bytes(name, row_type)
        if size >= found[-1].bytes:  # of as many bytes, the type of more bits is the better one
            continue
        tables.convert(name, row_type)
        found.append(TypeCost(row_type.name, size, change()))
    tables.convert(name, trained)
    return TableCosts(name, *tables.shape(name), tuple(found))


def _changes(costs: Sequence[TableCosts], budget: int | None, max_ne: float | None) -> list[tuple[int, int]]:
    """Return changes (table, position of its new type), the best first.

    They end where the budget is met; without one, where their losses of NE add up to `max_ne`.
    """
    changes: list[tuple[int, int]] = []
    places, total, spent = [0] * len(costs), sum(table.types[0].bytes for table in costs), 0.0
    while budget is None or total > budget:
        best: tuple[float, int, int, int, float] | None = None
        for t, table in enumerate(costs):
            now = table.types[places[t]]
            for place in range(places[t] + 1, len(table.types)):
                saved = now.bytes - table.types[place].bytes
                loss = max(table.types[place].loss - max(now.loss, 0.0), _LEAST_LOSS)
                fits = budget is not None or max_ne is None or spent + loss <= max_ne
                if fits and (best is None or saved / loss > best[0]):
                    best = (saved / loss, t, place, saved, loss)
        if best is None:
            break
        _, t, place, saved, loss = best
        places[t], total, spent = place, total - saved, spent + loss
        changes.append((t, place))
    if budget is not None and total > budget:
        raise ConfigError(
            f"--budget: got {byte_text(budget)}; expected at least {byte_text(total)}, the size of all tables with the "
            "smallest types. Raise it, or add a smaller type to --types."
        )
    return changes


def _after(costs: Sequence[TableCosts], changes: Sequence[tuple[int, int]]) -> dict[str, str]:
    """Return the row type of each table after these changes."""
    places = dict(changes)  # the last change of a table counts
    return {table.name: table.types[places.get(t, 0)].row_type for t, table in enumerate(costs)}
