"""`ParquetGroups`: row groups of Parquet files, local or remote.

A file is open only while one of its row groups is read, so neither open files nor footers accumulate. Of each file the
numbers of rows are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet

from tilerec.data.arrow_values import kind_of
from tilerec.data.columns import nearest
from tilerec.data.file_list import DataFile, Paths, list_files
from tilerec.data.row_groups import Bounds, GroupReader, RowGroups
from tilerec.errors import ConfigError, InputError

ENDINGS = (".parquet", ".parq", ".pq")
_READ_ERRORS = (OSError, pa.ArrowException, EOFError)
_FOOTERS_AT_ONCE = 16


class _Footer(NamedTuple):
    rows: tuple[int, ...]
    schema: pa.Schema


class ParquetGroups(RowGroups):
    """Row groups of Parquet files, in the order of the files.

    Args:
        paths: a file, a folder, a pattern, a URL, or a list of them (`file_list.py`).
        base: folder of relative local paths.

    Raises:
        InputError: there are no files, a file is not Parquet or is truncated, or all are empty.
    """

    def __init__(self, paths: Paths, *, base: str = "") -> None:
        self.files = list_files(paths, ENDINGS, base=base)
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            footers = list(pool.map(_read_footer, self.files))
        places = [
            (number, group, rows)
            for number, footer in enumerate(footers)
            for group, rows in enumerate(footer.rows)
            if rows
        ]
        self.name = self.files[0].name if len(self.files) == 1 else f"{len(self.files)} Parquet files"
        if not places:
            raise InputError(f"{self.files[0].name}: got {self.name} without rows; expected data. Check the path.")
        self.group_files = tuple(number for number, _, _ in places)
        self._groups = tuple(group for _, group, _ in places)
        self.group_rows = tuple(rows for _, _, rows in places)
        self.schema = footers[self.group_files[0]].schema
        # Equal schemas are one object: files of a data set have few.
        distinct = {footer.schema.to_string(): footer.schema for footer in footers}
        self._schemas = [distinct[footer.schema.to_string()] if footer.rows else None for footer in footers]

    def where(self, group: int) -> str:
        return f"{self.files[self.group_files[group]].name}, row group {self._groups[group]}"

    @contextmanager
    def open(self, group: int) -> Iterator[GroupReader]:
        reader = _ParquetReader(self.files[self.group_files[group]], self._groups[group], self.where(group))
        try:
            yield reader
        finally:
            reader.close()

    def key_type(self, column: str) -> pa.DataType:
        kinds = {schema.field(column).type for schema in self._schemas if schema is not None}
        if len(kinds) == 1:
            return kinds.pop()
        try:
            return _common_type(kinds)
        except pa.ArrowException as error:
            raise InputError(
                f"{self.name}: key column {column!r}: got {' and '.join(sorted(map(str, kinds)))} in different files; "
                "expected types with a common one. Write the files again with one schema, or choose other keys."
            ) from error

    def check_columns(self, columns: Sequence[str]) -> None:
        first = self.files[self.group_files[0]].name
        checked: set[int] = set()
        for file, schema in zip(self.files, self._schemas, strict=True):
            if schema is None or id(schema) in checked:
                continue
            checked.add(id(schema))
            for name in columns:
                if schema.names.count(name) != 1:
                    count = schema.names.count(name)
                    if not count:
                        raise ConfigError(f"{file.name}: got no column {name!r}; {nearest(name, schema.names)}")
                    raise ConfigError(
                        f"{file.name}: got column {name!r} {count} times; expected it once. Rename one of them."
                    )
                kind, wanted = schema.field(name).type, self.schema.field(name).type
                if kind_of(kind) != kind_of(wanted):
                    raise InputError(
                        f"{file.name}: column {name!r}: got {kind}; expected {wanted}, as in {first}. Write the files "
                        "again with one schema."
                    )


class _ParquetReader(GroupReader):
    def __init__(self, file: DataFile, group: int, where: str) -> None:
        self._data, self._group, self._where = file, group, where
        self._file = file.attempt(lambda: _open(file), _READ_ERRORS)

    def read(self, columns: Sequence[str]) -> pa.Table:
        def decode() -> pa.Table:
            try:
                return self._file.read_row_group(self._group, columns=list(columns), use_threads=False)
            except _READ_ERRORS:
                if self._data.remote:  # a stream that failed may have lost its place
                    self.close()
                    self._file = _open(self._data)
                raise

        try:
            return self._data.attempt(decode, _READ_ERRORS)
        except _READ_ERRORS as error:
            names = ", ".join(map(repr, columns[:4])) + (", …" if len(columns) > 4 else "")
            raise InputError(
                f"{self._where}: columns {names}: got data that cannot be decoded ({error}); expected a whole file. "
                "Copy "
                "or write it again."
            ) from error

    def column_bytes(self, column: str) -> int:
        # Dictionaries make the file smaller than the memory: 8 bytes per number are the least.
        return sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in self._chunks.get(column, []))

    def bounds(self, column: str) -> Bounds | None:
        chunks = self._chunks.get(column, [])
        if len(chunks) != 1:
            return None
        found = chunks[0].statistics
        if found is None or not found.has_min_max or not found.has_null_count or found.null_count:
            return None
        return found.min, found.max

    @cached_property
    def _chunks(self) -> dict[str, list[parquet.ColumnChunkMetaData]]:
        """Column chunks of the row group by column; a nested column has several."""
        group = self._file.metadata.row_group(self._group)
        found: dict[str, list[parquet.ColumnChunkMetaData]] = {}
        for index in range(group.num_columns):
            chunk = group.column(index)
            found.setdefault(chunk.path_in_schema.split(".")[0], []).append(chunk)
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)


def _common_type(kinds: Iterable[pa.DataType]) -> pa.DataType:
    """Return a type for the values of columns of one class (`kind_of`) and different types."""
    plain = (kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds)
    schemas = [pa.schema([("", pa.string() if pa.types.is_string_view(kind) else kind)]) for kind in plain]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _open(file: DataFile) -> parquet.ParquetFile:
    # A remote file is read in few large ranges, a local one column by column.
    return parquet.ParquetFile(file.path if not file.remote else file.open(), pre_buffer=file.remote)


def _read_footer(file: DataFile) -> _Footer:
    def read() -> _Footer:
        reader = _open(file)
        try:
            metadata = reader.metadata
            rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
            return _Footer(rows, reader.schema_arrow)
        finally:
            reader.close(force=True)

    try:
        return file.attempt(read, _READ_ERRORS)
    except _READ_ERRORS as error:
        raise InputError(
            f"{file.name}: got a file that cannot be read as Parquet ({error}), because it is damaged, incomplete or "
            "of "
            "another format; expected a whole Parquet file. Copy or write it again."
        ) from error
