"""The catalog of files: distinct items, with their features and their occurrences in the training part.

Each row group is read once and reduced to its distinct items, so memory grows with the items and not with the rows. Of
an item with several rows, the first one gives the features.

Legend: N items, n rows of a row group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as arrow
import torch

from tilerec.data.arrow_values import is_list, kind_of
from tilerec.data.column_checks import check_id_types
from tilerec.data.columns import Columns, nearest
from tilerec.data.dataset import Catalog
from tilerec.data.fields import BagIds, read_ids, read_label
from tilerec.data.hold_out import HeldOutRows
from tilerec.data.interaction_log import readable
from tilerec.data.row_groups import RowGroups
from tilerec.errors import ConfigError, InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

_MOST_ROWS = 1 << 20
"""Rows of distinct items of row groups that are kept before they are reduced again."""


class ItemReader:
    """Items of files with the columns of a run.

    Args:
        columns: roles of the columns.
        item: feature with the id of the item.
        others: further features of an item.

    Raises:
        ConfigError: a feature does not exist, or cannot describe an item.
    """

    def __init__(self, columns: Columns, item: str, others: Sequence[str] = ()) -> None:
        known = {column.feature: column for column in columns.ids}
        for name in (item, *others):
            if name not in known:
                raise ConfigError(f"task: got item feature {name!r}, which the data lack; {nearest(name, known)}")
        self._columns, self._item, self._others = columns, known[item], [known[name] for name in others]
        if self._item.boundaries or self._item.kind != "single":
            raise ConfigError(
                f"task.item: got {item!r} with kind={self._item.kind!r}; expected a column with one id and without "
                "boundaries. Name the column of the item."
            )
        weighted = [column.feature for column in self._others if column.weights]
        if weighted:
            raise ConfigError(f"task: got item feature {weighted[0]!r} with weights; expected none. Leave them out.")
        # Items that occur in lists only are items as well, unless they need further features.
        self._lists = [
            column
            for column in columns.ids
            if column.table_name == self._item.table_name and column is not self._item and not others
        ]

    def catalog(self, source: RowGroups, counted: RowGroups, held: HeldOutRows | None) -> Catalog:
        """Return the items of a source, ordered by value.

        Args:
            source: files with the items.
            counted: files of samples, whose training part is counted; may be the source.
            held: their held-out rows; None: none.

        Raises:
            InputError: a column cannot be read.
        """
        if source is not counted:
            check_id_types(source, self._columns)
        counts = self._counts(counted, held)
        first = counts.select(["item"]) if source is counted and not self._others else self._first_rows(source)
        first = first.take(arrow.sort_indices(first.column("item")))
        values = first.column("item").combine_chunks()
        column = replace(self._item, missing="empty")
        bags = read_ids(self._columns, column, lambda name: pa.chunked_array([values]), source.name)
        place = arrow.index_in(values, counts.column("item").combine_chunks())
        count_N = arrow.fill_null(counts.column("count").combine_chunks().take(place), 0)
        features = [bags]
        for other in self._others:
            found = first.column(other.column)
            features.append(
                read_ids(self._columns, other, lambda name, found=found: found, source.name)  # type: ignore[misc]
            )
        names = [self._item.feature, *(other.feature for other in self._others)]
        return Catalog(
            torch.from_numpy(bags.values.copy()),  # row numbers may lie in Arrow's memory, which is read-only
            readable(values),
            torch.from_numpy(count_N.to_numpy().astype(np.int64)),
            _joined(names, features, len(values)),
        )

    def _counts(self, source: RowGroups, held: HeldOutRows | None) -> pa.Table:
        """Return the columns `item` and `count`: occurrences in training samples with a label above 0."""
        labels = self._columns.labels[:1]
        labels = labels if labels and labels[0].column in source.schema.names else ()
        columns = dict.fromkeys(
            [self._item.column, *(one.column for one in self._lists), *(one.column for one in labels)]
        )
        parts: list[pa.Table] = []
        for group in source.in_order():
            with source.open(group) as reader:
                table = reader.read([name for name in columns if name in source.schema.names])
            counted_n = np.ones(table.num_rows, np.bool_)
            mask = None if held is None else held.mask(group)
            if mask is not None:
                counted_n &= ~mask
            if labels:
                counted_n &= read_label(labels[0], table.column, source.where(group)) > 0
            parts.append(_occurrences(_values(table.column(self._item.column), source.where(group)), counted_n))
            for one in self._lists:
                if one.column in table.column_names:
                    values = _values(table.column(one.column), source.where(group))
                    parts.append(_occurrences(values, np.zeros(len(values), np.bool_)))
            if sum(part.num_rows for part in parts) > _MOST_ROWS:
                parts = [_summed(parts)]
        return _summed(parts)

    def _first_rows(self, source: RowGroups) -> pa.Table:
        """Return the first row of each item: `item` and the columns of the other features."""
        names = list(dict.fromkeys(one.column for one in self._others))
        for name in (self._item.column, *names):
            if name not in source.schema.names:
                raise ConfigError(
                    f"{source.name}: got no column {name!r}; expected the columns of the items. "
                    f"Add it, {nearest(name, source.schema.names)}"
                )
        parts: list[pa.Table] = []
        for group in source.in_order():
            with source.open(group) as reader:
                table = reader.read(list(dict.fromkeys([self._item.column, *names])))
            item = _values(table.column(self._item.column), source.where(group))
            renamed = pa.table({"item": item, **{name: table.column(name) for name in names}})
            parts.append(_first(renamed))
            if sum(part.num_rows for part in parts) > _MOST_ROWS:
                parts = [_first(pa.concat_tables(parts))]
        return _first(pa.concat_tables(parts))


def _values(column: pa.ChunkedArray, where: str) -> pa.Array:
    """Return the values of a column or of its lists, as int64 or large_binary; nulls stay."""
    if is_list(column.type):
        column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = kind_of(column.type)
    if kind not in ("integer", "text", "boolean"):
        raise InputError(f"{where}: items: got {column.type}; expected integers or text. Convert the column.")
    joined: Any = column.cast(pa.large_binary() if kind == "text" else pa.int64()).combine_chunks()
    return joined


def _occurrences(values: pa.Array, counted_n: npt.NDArray[np.bool_]) -> pa.Table:
    return _summed([pa.table({"item": values, "count": pa.array(counted_n.astype(np.int64))})])


def _summed(parts: list[pa.Table]) -> pa.Table:
    """Return each item once, with the sum of its counts; without nulls."""
    whole = pa.concat_tables(parts)
    summed = whole.filter(arrow.is_valid(whole.column("item"))).group_by("item").aggregate([("count", "sum")])
    return summed.select(["item", "count_sum"]).rename_columns(["item", "count"])


def _first(table: pa.Table) -> pa.Table:
    """Return the first row of each item; without nulls."""
    table = table.filter(arrow.is_valid(table.column("item")))
    numbered = pa.table({"item": table.column("item"), "row": np.arange(table.num_rows)})
    rows = numbered.group_by("item").aggregate([("row", "min")]).column("row_min").combine_chunks()
    return table.take(rows.take(arrow.sort_indices(rows)))


def _joined(names: list[str], features: list[BagIds], stride: int) -> KeyedJaggedTensor:
    lengths = [np.ones(stride, np.int64) if bags.offsets is None else np.diff(bags.offsets) for bags in features]
    return KeyedJaggedTensor(
        names,
        torch.from_numpy(np.concatenate([bags.values for bags in features])),
        lengths=torch.from_numpy(np.concatenate(lengths)),
        stride=stride,
    )
