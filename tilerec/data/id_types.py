"""Types of ids: integers and texts have different hashes, so all files of a run have the types of its training data.

training data     user 7, item "A12"        user: integer, item: text
further CSV       user 8, item 77           item 77 is read as text
further Parquet   user "7"                  an error, as the column is text
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from tilerec.data.arrow_values import kind_of
from tilerec.data.columns import Columns, IdColumn, IdType
from tilerec.data.row_groups import RowSource
from tilerec.data.sample_table import is_unknown

_TYPES: dict[str, IdType] = {"integer": "integer", "boolean": "integer", "text": "text"}
"""Type of ids by the class of their column (`kind_of`); True and False are the ids 1 and 0."""


def typed(columns: Columns, source: RowSource) -> Columns:
    """Return the roles with the types of a source's ids in place of "auto"; columns that it lacks stay as they are."""
    ids = tuple(_typed(column, source) for column in columns.ids)
    return columns if ids == columns.ids else replace(columns, ids=ids)


def _typed(column: IdColumn, source: RowSource) -> IdColumn:
    if column.type != "auto" or column.boundaries or source.schema.names.count(column.column) != 1:
        return column
    kind: pa.DataType = source.schema.field(column.column).type
    if source.sampled and is_unknown(kind):
        return column
    return replace(column, type=_TYPES.get(kind_of(kind).removeprefix("list of "), "auto"))
