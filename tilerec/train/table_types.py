"""Choice of a row type per table, by data: few bytes for little normalized entropy (NE).

  1. Each table alone is rounded to each type, and the model is scored: what the type costs, in NE.
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

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.ops.quantized.row_format import check_quantizable, dequantize_rows, quantize_rows
from tilerec.quantized.quantize import quantize_tables
from tilerec.quantized.row_type import ROW_TYPES, RowType
from tilerec.spec.byte_text import byte_text

Score = Callable[[nn.Module], float]
"""Returns the normalized entropy of a model on held-out samples."""

_AS_TRAINED = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_LEAST_LOSS = (
    1e-9  # relative NE: smaller losses and gains count as this much, so that their order is that of their bytes
)


@dataclass(frozen=True)
class TypeCost:
    """A row type of a table: its bytes, and the relative change of NE if only this table has it."""

    row_type: str
    bytes: int
    ne_change: float


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
        float_ne, ne: normalized entropy of the model as trained, and of the quantized one.
    """

    costs: tuple[TableCosts, ...]
    types: Mapping[str, str]
    float_ne: float
    ne: float

    @property
    def ne_change(self) -> float:
        """Relative change of NE."""
        return self.ne / self.float_ne - 1

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


def choose_types(
    model: nn.Module, score: Score, types: Sequence[RowType], budget: int | None, max_ne: float | None
) -> tuple[TypeChoice, nn.Module]:
    """Choose a row type per table.

    Args:
        model: unsharded, in evaluation mode. Rows of one table at a time are rounded and restored.
        score: returns the NE of a model.
        types: candidates, besides each table's own.
        budget: most bytes of all tables; None: as few as `max_ne` allows.
        max_ne: most relative increase of NE; None: any.

    Returns:
        The choice, and a quantized copy of the model.

    Raises:
        ConfigError: the budget cannot be met within `max_ne`, or at all; or NE is undefined.
        InputError: a table cannot be quantized.
    """
    float_ne = score(model)
    if not 0 < float_ne < float("inf"):
        raise ConfigError(
            f"normalized entropy: got {float_ne} on the held-out samples; expected a number above 0. Evaluate on "
            "samples with both labels."
        )
    tables = _tables(model)
    if not tables:
        raise ConfigError(
            "tilerec quantize: got a model without tables; expected embedding tables. Train one with some."
        )
    costs = tuple(_costs(name, leaves, types, lambda: score(model) / float_ne - 1) for name, leaves in tables.items())
    changes = _changes(costs, budget, max_ne)
    while True:
        chosen = _after(costs, changes)
        made = quantize_tables(model, per_table=chosen)
        choice = TypeChoice(costs, chosen, float_ne, score(made))
        if max_ne is None or choice.ne_change <= max_ne or not changes:
            return choice, made
        if budget is not None:
            raise ConfigError(
                f"--budget: got {byte_text(budget)} with --max-ne {max_ne:.4%}; expected limits that fit together. The "
                f"types for this budget raise NE by {choice.ne_change:.4%}. Raise one of the two."
            )
        changes = changes[: len(changes) * 3 // 4]  # the last ones lose the most for their bytes


def _tables(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the rows of the model's tables by name; tied tables once."""
    found: dict[str, list[Tensor]] = {}
    for module in model.modules():
        if isinstance(module, TableCollection):
            for name, table in module._tables.items():
                assert isinstance(table, Table)
                leaf = table.weight.detach()
                leaves = found.setdefault(name, [])
                if all(leaf.data_ptr() != other.data_ptr() for other in leaves):
                    leaves.append(leaf)
    return found


def _costs(name: str, leaves: list[Tensor], types: Sequence[RowType], change: Callable[[], float]) -> TableCosts:
    """Measure each type of a table; `change` returns the relative change of NE with the rows as they are now."""
    trained = ROW_TYPES[_AS_TRAINED.get(leaves[0].dtype, "fp32")]

    def size(row_type: RowType) -> int:
        return sum(leaf.shape[0] * row_type.row_bytes(leaf.shape[1]) for leaf in leaves)

    found = [TypeCost(trained.name, size(trained), 0.0)]
    for leaf in leaves:
        check_quantizable(leaf, name)
    before = [leaf.clone() for leaf in leaves]
    for row_type in sorted(types, key=lambda own: own.bits or 16, reverse=True):
        if size(row_type) >= found[-1].bytes:  # of as many bytes, the type of more bits is the better one
            continue
        try:
            for leaf in leaves:
                leaf.copy_(_rounded(leaf, row_type))
            found.append(TypeCost(row_type.name, size(row_type), change()))
        finally:
            for leaf, rows in zip(leaves, before, strict=True):
                leaf.copy_(rows)
    return TableCosts(name, sum(leaf.shape[0] for leaf in leaves), leaves[0].shape[1], tuple(found))


def _rounded(rows: Tensor, row_type: RowType) -> Tensor:
    if not row_type.bits:
        return rows.to(row_type.dtype)
    return dequantize_rows(quantize_rows(rows, row_type.bits), rows.shape[1], row_type.bits)


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
                loss = max(table.types[place].ne_change - max(now.ne_change, 0.0), _LEAST_LOSS)
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
