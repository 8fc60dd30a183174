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
from tilerec.errors import ConfigError

_TYPES: dict[str, IdType] = {"integer": "integer", "boolean": "integer", "text": "text"}
"""Type of ids by the class of their column (`kind_of`); True and False are the ids 1 and 0."""


def id_type(kind: pa.DataType) -> IdType:
    """Return the type of the ids of a column, or of lists of them; "auto" for columns without ids."""
    return _TYPES.get(kind_of(kind).removeprefix("list of "), "auto")


def typed(columns: Columns, source: RowSource) -> Columns:
    """Return the roles with the types of a source's ids in place of "auto"; columns that it lacks stay as they are."""
    ids = tuple(_typed(column, source) for column in columns.ids)
    if ids == columns.ids:
        return columns
    found = replace(columns, ids=ids)
    if "vocabularies" in vars(columns):  # their files are read once
        vars(found)["vocabularies"] = columns.vocabularies
    return found


def _typed(column: IdColumn, source: RowSource) -> IdColumn:
    if column.type != "auto" or column.boundaries or source.schema.names.count(column.column) != 1:
        return column
    kind = source.schema.field(column.column).type
    return column if source.sampled and is_unknown(kind) else replace(column, type=id_type(kind))


def check_vocabularies(columns: Columns, source: RowSource) -> None:
    """Raise `ConfigError` if the ids of a source have another type than the vocabulary of their table."""
    known = columns.vocabularies
    for column in typed(columns, source).ids if known else ():
        wanted = known[column.table_name].type if column.table_name in known else ""
        if wanted and column.type not in ("auto", wanted):
            raise ConfigError(
                f"{source.name}: id column {column.column!r}: got {column.type} ids for a vocabulary of {wanted} ids, "
                f"which would all be unknown; expected {wanted} ids. Count the vocabulary on files of the same types."
            )
