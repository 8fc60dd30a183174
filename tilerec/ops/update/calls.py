"""Records of the update ops' calls; each record is assembled from an op's arguments, and taken apart, here only.

Legend: T tables, F features, N ids, U distinct rows, W columns of a part, P row sums of the phases so far, S slots per
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilerec.ops.runtime.library import new_record

_DEFAULTS = (None,) * 4  # of the last arguments of `update_rows_`, which the dispatcher may leave out


class Features(NamedTuple):
    """Lists per feature of a gradient record.

    The row gradient of feature f's bag b begins at element `grad_starts[f] + b * grad_strides[f]` of the gradient.
    """

    tables: Sequence[int]  # that the features read
    starts: Sequence[int]  # first bags
    bags: Sequence[int]  # numbers of bags
    grad_starts: Sequence[int]
    grad_strides: Sequence[int]
    means: Sequence[int]  # 1 for mean pooling

    def of_table(self, table: int) -> Features:
        """Return the lists of the features that read a table."""
        own = [f for f, t in enumerate(self.tables) if t == table]
        return Features(*[[values[f] for f in own] for values in self])


class RecordSizes(NamedTuple):
    """Elements of a gradient record's tensors; `offsets` None: every id is its own bag."""

    grad: int
    ids: int
    offsets: int | None


class Gradients(NamedTuple):
    """A gradient record: an output gradient, the ids, and the positions of the features' bags in both.

    ids, offsets and sample weights are as in the lookup; with `offsets=None` every id is its own bag.
    """

    grad: Tensor
    ids: Tensor
    offsets: Tensor | None
    sample_weights: Tensor | None
    features: Features

    @property
    def sizes(self) -> RecordSizes:
        offsets = None if self.offsets is None else self.offsets.numel()
        return RecordSizes(self.grad.numel(), self.ids.numel(), offsets)

    def packed(self) -> tuple[Any, ...]:
        return (self.grad, self.ids, self.offsets, self.sample_weights, *self.features)


class RuleTables(NamedTuple):
    """T tables, or parts of tables, and the rule that updates them.

    Args:
        weights: T tables `[rows, columns]`; `slots[t * S + k]` is slot k of table t.
        hyper: the rule's numbers, in the order that `spec/optimizer.py` defines.
        steps: per table, its update count after this update.
        seeds, row_offsets, column_offsets: key words (two per table) and global position, for stochastic rounding.
        row_names: per table int64 `[rows]`, or `[0]`: random words and results use the number `names[r]` for row r
            (lines of a cache hold rows with any numbers). None: they use r.
        counts: per table its update count on the ids' device, int64 0-d. The update reads `counts[t] + 1` in place of
            `steps` (then empty) and writes it back, even if the record has no rows of the table. So a captured call
            advances the count with every replay.
        lr: 0-d, only with `counts`: the learning rate, in place of `hyper[0]`.
    """

    weights: Sequence[Tensor]
    slots: Sequence[Tensor]
    rule: str
    hyper: Sequence[float]
    steps: Sequence[int]
    seeds: Sequence[int]
    row_offsets: Sequence[int]
    column_offsets: Sequence[int]
    row_names: Sequence[Tensor] | None = None
    counts: Sequence[Tensor] | None = None
    lr: Tensor | None = None

    @staticmethod
    def of_sums(weights: Sequence[Tensor]) -> RuleTables:
        """Return tables into which the rule "store" writes row sums."""
        zeros = [0] * len(weights)
        return RuleTables(weights, [], "store", [], zeros, zeros + zeros, zeros, zeros)

    @property
    def rows(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]

    @property
    def columns(self) -> list[int]:
        return [weight.shape[1] for weight in self.weights]

    def slots_of(self, table: int) -> Sequence[Tensor]:
        each = len(self.slots) // len(self.weights)
        return self.slots[table * each : (table + 1) * each]


class PartRows(NamedTuple):
    """Distinct rows of T parts in this step.

    Args:
        rows: per part `[U]`.
        grads: per part, the summed gradients `[U, W]`.
        scalars: per part, the row sums so far `[P, U]`.
        dims: per part, the columns of the whole row.
    """

    rows: Sequence[Tensor]
    grads: Sequence[Tensor]
    scalars: Sequence[Tensor]
    dims: Sequence[int]


class UpdateCall(NamedTuple):
    """One call of `update_rows_`.

    ordered: the result of `order_rows` for the same tables, ids, weights and lists per feature, for backends that
    sort; the reference ignores it.
    """

    tables: RuleTables
    gradients: Gradients
    ordered: Sequence[Tensor] | None = None

    @staticmethod
    def unpack(*args: Any) -> UpdateCall:
        """Return the call from the op's arguments; the inverse of `packed`."""
        args += _DEFAULTS[len(args) - 18 :]
        gradients = new_record(Gradients, (*args[2:6], new_record(Features, args[6:12])))
        tables = new_record(RuleTables, args[:2] + args[12:21])
        return new_record(UpdateCall, (tables, gradients, args[21]))

    def packed(self) -> tuple[Any, ...]:
        """Return the arguments of the op."""
        weights, slots, *rest = self.tables
        return (weights, slots, *self.gradients.packed(), *rest, self.ordered)


class OrderCall(NamedTuple):
    """One call of `order_rows`. An order reads no gradients: the record has the ids in their place."""

    weights: Sequence[Tensor]
    gradients: Gradients

    @staticmethod
    def unpack(
        weights: Sequence[Tensor], ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None,
        *features: Sequence[int],
    ) -> OrderCall:  # fmt: skip
        return OrderCall(weights, Gradients(ids, ids, offsets, sample_weights, Features(*features)))


class SumCall(NamedTuple):
    """One call of `sum_row_gradients_of_tables`.

    Args:
        rows, dims: per table: rows (0: unknown) and columns.
        ordered: the result of `order_rows` for tables of these rows and one column each; read by backends that sort.
    """

    gradients: Gradients
    rows: Sequence[int]
    dims: Sequence[int]
    ordered: Sequence[Tensor] | None = None

    @staticmethod
    def unpack(
        grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, rows: Sequence[int],
        dims: Sequence[int], *rest: Any,
    ) -> SumCall:  # fmt: skip
        """Return the call from the op's arguments; the inverse of `packed`."""
        gradients = Gradients(grad, ids, offsets, sample_weights, Features(*rest[:6]))
        return SumCall(gradients, rows, dims, *rest[6:])

    def packed(self) -> tuple[Any, ...]:
        """Return the arguments of the op."""
        *tensors, features = self.gradients
        return (*tensors, self.rows, self.dims, *features, self.ordered)


class PartialsCall(NamedTuple):
    """One call of `rule_partials_of_tables`. Its op gets no seeds, row offsets and row names: it writes no rows.

    Args:
        exact: return one sum per aligned block of 8 global columns that the part touches.
        finite: return one more sum, K + 1 in all: 1 everywhere if the row's gradient is finite in this part, else 0.
    """

    tables: RuleTables
    parts: PartRows
    phase: int
    exact: bool
    finite: bool

    @staticmethod
    def unpack(weights: Sequence[Tensor], slots: Sequence[Tensor], *rest: Any) -> PartialsCall:
        """Return the call from the op's arguments; the inverse of `packed`."""
        rows, grads, scalars, phase, dims, exact, finite, column_offsets, rule, hyper, steps, *counting = rest
        zeros = [0] * len(weights)
        tables = RuleTables(weights, slots, rule, hyper, steps, zeros + zeros, zeros, column_offsets, None, *counting)
        return PartialsCall(tables, PartRows(rows, grads, scalars, dims), phase, exact, finite)

    def packed(self) -> tuple[Any, ...]:
        """Return the arguments of the op."""
        tables, (rows, grads, scalars, dims) = self.tables, self.parts
        return (
            tables.weights, tables.slots, rows, grads, scalars, self.phase, dims, self.exact, self.finite,
            tables.column_offsets, tables.rule, tables.hyper, tables.steps, tables.counts, tables.lr,
        )  # fmt: skip


class ApplyCall(NamedTuple):
    """One call of `rule_apply_to_tables_`; the scalars of its parts are the reduced row sums of all phases."""

    tables: RuleTables
    parts: PartRows

    @staticmethod
    def unpack(weights: Sequence[Tensor], slots: Sequence[Tensor], *rest: Any) -> ApplyCall:
        """Return the call from the op's arguments; the inverse of `packed`."""
        return ApplyCall(RuleTables(weights, slots, *rest[4:]), PartRows(*rest[:4]))

    def packed(self) -> tuple[Any, ...]:
        """Return the arguments of the op."""
        weights, slots, *rest = self.tables
        return (weights, slots, *self.parts, *rest)
