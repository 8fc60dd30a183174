"""CSV and TSV files to Parquet, in bounded memory, with statistics of the columns.

Memory holds one block of text and the rows of one row group. The result appears under its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as parquet

from tilerec.atomic_file import open_replacement
from tilerec.data.arrow_values import as_int64, read_values
from tilerec.data.delimited import OnBadRow, RowCount
from tilerec.data.file_list import Paths, list_files
from tilerec.data.hyperloglog import HyperLogLog
from tilerec.data.rows import hash_values
from tilerec.data.text_files import ENDINGS, ListColumn, TextLayout, stored_type
from tilerec.errors import ConfigError, InputError
from tilerec.file_kind import CONVERT, check_kind
from tilerec.output_path import check_output

ROWS_PER_GROUP = 1 << 17


@dataclass
class ColumnSummary:
    """Statistics of a column.

    Attributes:
        name, kind: name and Arrow type.
        missing: number of empty fields.
        values: number of values, those inside of lists included.
        low, high: least and greatest number; None for text.
        distinct: approximate number of distinct values (`HyperLogLog`, 0.8 %).
    """

    name: str
    kind: str
    missing: int = 0
    values: int = 0
    low: float | None = None
    high: float | None = None
    distinct: int = 0


@dataclass
class Conversion:
    """Result of a conversion.

    Attributes:
        rows: rows written.
        skipped: malformed lines left out.
        examples: messages of the first of them.
        columns: statistics by column.
    """

    rows: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    columns: list[ColumnSummary] = field(default_factory=list)


def convert(
    paths: Paths,
    out: str | Path,
    *,
    delimiter: str = "",
    names: Sequence[str] = (),
    lists: Sequence[ListColumn] = (),
    texts: Sequence[str] = (),
    on_bad_row: OnBadRow = "error",
    rows_per_group: int = ROWS_PER_GROUP,
    report: Callable[[int, int, int], None] | None = None,
) -> Conversion:
    """Write delimited text files, plain or gzip, as one Parquet file.

    Types of the columns follow from the first rows of the first file. Texts must be UTF-8; empty fields become nulls.

    Args:
        paths: files, in the order of their rows (`file_list.py`).
        out: the Parquet file; it replaces an earlier one of this function, and no other file.
        delimiter, names, lists, texts: see `TextLayout`.
        on_bad_row: "error", or "skip" to leave malformed lines out and count them.
        rows_per_group: rows of a row group, which is the unit that training reads and shuffles.
        report: called with (bytes read, bytes in all, rows) after each block.

    Raises:
        InputError: a file is missing, empty, or has a malformed line.
        ConfigError: a setting is invalid, or `out` is one of the files, in one of the folders, or another file.
        FileError: `out` cannot be written; an earlier file stays unchanged.
    """
    if rows_per_group < 1:
        raise ConfigError(f"rows_per_group: got {rows_per_group}; expected at least 1. Leave it out for the default.")
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    check_output("out (--out)", out, {"the input": given})
    check_kind("out (--out)", out, CONVERT)
    files = list_files(given, (*ENDINGS, *(f"{ending}.gz" for ending in ENDINGS)))
    remote = next((file.name for file in files if file.remote), "")
    if remote:
        raise ConfigError(
            f"files: got the URL {remote}; expected local files. Copy them, or train from them as they are: run files "
            "take URLs."
        )
    layout = TextLayout(files[0], delimiter=delimiter, names=names, lists=lists, texts=texts, compressed=True)
    total = sum(file.size() for file in files)
    summaries = [_Summary(name, kind) for name, kind in zip(layout.schema.names, layout.schema.types, strict=True)]
    done, result = 0, Conversion()
    schema = pa.schema(
        [(name, stored_type(kind)) for name, kind in zip(layout.schema.names, layout.schema.types, strict=True)],
        CONVERT.metadata,
    )
    with open_replacement(out, "convert") as target:
        writer = _GroupWriter(target, schema, rows_per_group)
        with writer:
            for file in files:
                count = RowCount()
                for block in layout.parser(file, on_bad_row=on_bad_row).blocks(count):
                    table = layout.table(block, f"{file.name}, from line {int(block.lines[0])}")
                    table = table.select(layout.schema.names)
                    for summary, column in zip(summaries, table.columns, strict=True):
                        summary.add(column)
                    writer.write(_cast(table, schema, f"{file.name}, from line {int(block.lines[0])}"))
                    if report is not None:
                        report(done + count.bytes_read, total, result.rows + count.rows)
                done += file.size()
                result.rows += count.rows
                result.skipped += count.skipped
                result.examples += count.examples
        if not result.rows:
            raise InputError(f"{files[0].name}: got no rows; expected lines of data. Check the path.")
    result.columns = [summary.result() for summary in summaries]
    return result


def _cast(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    try:
        return table.cast(schema)
    except pa.ArrowInvalid as error:
        raise InputError(
            f"{where}: got text that is not UTF-8 ({error}); expected UTF-8. Convert the file's encoding first, for "
            "example with iconv."
        ) from error


class _GroupWriter:
    """Writes tables of any size as row groups of one size."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, rows_per_group: int) -> None:
        self._writer = parquet.ParquetWriter(file, schema, compression="zstd")
        self._rows_per_group = rows_per_group
        self._held: list[pa.Table] = []
        self._rows = 0

    def __enter__(self) -> _GroupWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._rows:
            self._flush()
        self._writer.close()

    def write(self, table: pa.Table) -> None:
        """Add rows; full row groups are written."""
        while self._rows + table.num_rows >= self._rows_per_group:
            head = self._rows_per_group - self._rows
            self._held.append(table.slice(0, head))
            self._flush()
            table = table.slice(head)
        if table.num_rows:
            self._held.append(table)
            self._rows += table.num_rows

    def _flush(self) -> None:
        self._writer.write_table(pa.concat_tables(self._held), row_group_size=self._rows_per_group)
        self._held, self._rows = [], 0


class _Summary:
    """Running statistics of a column."""

    def __init__(self, name: str, kind: pa.DataType) -> None:
        self._found = ColumnSummary(name, str(kind))
        self._distinct = HyperLogLog()

    def add(self, column: pa.ChunkedArray) -> None:
        """Count the values of further rows."""
        found = self._found
        values = read_values(column)
        numbers: Any = values.values
        if values.missing is not None:
            found.missing += int(values.missing.sum())
            numbers = numbers[~values.missing]
        found.values += len(numbers)
        if not len(numbers):
            return
        if not values.hashed:
            low, high = float(numbers.min()), float(numbers.max())
            found.low = low if found.low is None else min(found.low, low)
            found.high = high if found.high is None else max(found.high, high)
        self._distinct.add(numbers if values.hashed else hash_values(as_int64(numbers)))

    def result(self) -> ColumnSummary:
        """Return the statistics."""
        self._found.distinct = round(self._distinct.count())
        return self._found
