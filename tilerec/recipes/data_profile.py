"""Profile of a data set's columns: types, missing values, distinct values and ranges of its first rows.

Parquet, CSV and TSV. The first rows are read once, batch by batch; of each column a sample of values is kept, and the
distinct values of all rows read are counted approximately (`HyperLogLog`). The footers of Parquet files give the number
of all rows.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet

from tilerec.data.arrow_values import as_int64, kind_of, read_values
from tilerec.data.file_list import DataFile, list_files
from tilerec.data.hyperloglog import HyperLogLog
from tilerec.data.parquet_files import ENDINGS as PARQUET_ENDINGS
from tilerec.data.rows import hash_values
from tilerec.data.text_files import ENDINGS as TEXT_ENDINGS
from tilerec.data.text_files import TextLayout
from tilerec.errors import InputError

_TEXT_OR_GZIP = (*TEXT_ENDINGS, *(f"{ending}.gz" for ending in TEXT_ENDINGS))
MOST_ROWS = 1_000_000
_SAMPLE = 100_000
_TIME_NAME = re.compile(r"time|date|^ts$|_ts$|^day$", re.IGNORECASE)
"""Names of columns whose numbers may be times. All of them are kept, for an exact split."""
_BATCH_ROWS = 1 << 16
_READ_ERRORS = (OSError, pa.ArrowException, EOFError)


@dataclass
class ColumnProfile:
    """Profile of one column.

    Attributes:
        name: of the column.
        type: its Arrow type, as text.
        kind: class of its values (`kind_of`).
        rows: rows that were read.
        missing: rows of them with a null, and with a NaN.
        values: values of all lists in these rows; `rows` less `missing` for other columns.
        sample: numbers of the first rows, float64, without missing ones; empty for text.
        low, high: bounds of all rows by the footers of Parquet files, if they have them.
        texts: some of the texts.
        longest: values of the longest list.
        listed: values of all lists, missing ones included.
        time_type: the Arrow type of dates and times; their sample has the integers that Arrow stores. None for others.
        time_text: of text files, the first time as it is written; "" for others.
    """

    name: str
    type: str
    kind: str
    rows: int = 0
    missing: int = 0
    values: int = 0
    sample: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    low: Any = None
    high: Any = None
    texts: tuple[str, ...] = ()
    longest: int = 0
    listed: int = 0
    time_type: pa.DataType | None = None
    time_text: str = ""
    _distinct: HyperLogLog = field(default_factory=HyperLogLog)
    _lengths: Any = field(default_factory=hashlib.blake2b)

    @property
    def distinct(self) -> int:
        """Approximate number of distinct values in the rows that were read."""
        return round(self._distinct.count())

    @property
    def lengths_digest(self) -> bytes:
        """A digest of the lengths of all lists that were read: columns with the same one have the same lengths."""
        digest: bytes = self._lengths.digest()
        return digest

    def add(self, column: pa.ChunkedArray) -> None:
        """Add the next rows of the column."""
        self.rows += len(column)
        if self.time_type is not None:
            column = _as_integers(column)
        elif self.kind.removeprefix("list of ") not in ("integer", "number", "boolean", "text"):
            self.missing += column.null_count
            return
        found = read_values(column)
        values = found.values
        missing = np.zeros(len(values), np.bool_) if found.missing is None else found.missing
        if values.dtype.kind == "f":
            missing = missing | np.isnan(values)
        if found.offsets is None:
            self.missing += int(missing.sum())
        elif found.missing_lists is not None:
            self.missing += int(found.missing_lists.sum())
        if found.offsets is not None and len(found.offsets) > 1:
            lengths = np.diff(found.offsets).astype(np.int64)
            self.longest = max(self.longest, int(lengths.max()))
            self.listed += int(lengths.sum())
            self._lengths.update(lengths.tobytes())
        kept = values[~missing]
        self.values += len(kept)
        self._distinct.add(kept if found.hashed else hash_values(as_int64(kept)))
        most = MOST_ROWS if self.time_type is not None or _TIME_NAME.search(self.name) else _SAMPLE
        if not found.hashed and len(self.sample) < most:
            self.sample = np.concatenate([self.sample, kept[: most - len(self.sample)].astype(np.float64)])
        if self.kind == "text" and len(self.texts) < 1000:
            self.texts += tuple(str(text) for text in column.slice(0, 1000).drop_null().to_pylist())


def _as_integers(times: pa.ChunkedArray) -> pa.ChunkedArray:
    width = pa.int32() if times.type.bit_width == 32 else pa.int64()
    return times.cast(width).cast(pa.int64())


@dataclass(frozen=True)
class DataProfile:
    """Profile of a data set.

    Attributes:
        name: the path, as given.
        format: "parquet" or "text".
        columns: in their order.
        rows: rows that were read.
        total: all rows; None if unknown, for text that was not read to its end.
    """

    name: str
    format: str
    columns: tuple[ColumnProfile, ...]
    rows: int
    total: int | None


def profile_data(path: str, most_rows: int = MOST_ROWS) -> DataProfile:
    """Profile the first rows of a file, folder, pattern or URL.

    Raises:
        InputError: there are no files, no rows, or a file cannot be read.
    """
    files = list_files(path, PARQUET_ENDINGS + _TEXT_OR_GZIP)
    layout = TextLayout(files[0], compressed=True) if files[0].name.endswith(_TEXT_OR_GZIP) else None
    columns: dict[str, ColumnProfile] = {}
    rows = 0
    whole = True
    for file, batch in _batches(files, layout):
        if rows >= most_rows:
            whole = False
            break
        table = pa.table(batch)
        _check_distinct(file, table.column_names)
        for name in table.column_names:
            kind = table.schema.field(name).type
            time = kind if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else None
            text = layout.times.get(name, "") if layout is not None else ""
            profile = ColumnProfile(name, str(kind), kind_of(kind), time_type=time, time_text=text)
            column = columns.setdefault(name, profile)
            column.add(table.column(name))
        rows += table.num_rows
    if not rows:
        raise InputError(f"{files[0].name}: got no rows; expected data with a header and rows. Check the path.")
    total = rows if whole else None
    if not (whole or layout is not None):
        total = _read_footers(files, columns)
    return DataProfile(path, "parquet" if layout is None else "text", tuple(columns.values()), rows, total)


def _batches(files: list[DataFile], layout: TextLayout | None) -> Iterator[tuple[DataFile, pa.RecordBatch]]:
    for file in files:
        try:
            with file.open() as stream:
                batches = (
                    parquet.ParquetFile(stream).iter_batches(_BATCH_ROWS)
                    if layout is None
                    else _text_batches(stream, file, layout)
                )
                for batch in batches:
                    yield file, batch
        except _READ_ERRORS as error:
            raise InputError(
                f"{file.name}: got {' '.join(str(error).split())[:300]}; expected a readable "
                f"{'Parquet file' if layout is None else 'CSV or TSV file with a header'}. Correct or copy it again."
            ) from error


def _text_batches(stream: BinaryIO, file: DataFile, layout: TextLayout) -> Iterator[pa.RecordBatch]:
    """Return the rows as the reader of text files reads them, but with dates and times, which it leaves as text."""
    return arrow_csv.open_csv(
        pa.input_stream(stream, compression="gzip" if file.name.endswith(".gz") else None),
        read_options=arrow_csv.ReadOptions(column_names=layout.names, skip_rows=1),
        parse_options=arrow_csv.ParseOptions(
            delimiter=layout.delimiter, quote_char='"' if layout.quotes else False, double_quote=layout.quotes
        ),
        # An empty field is a missing value, as for the reader of text files.
        convert_options=arrow_csv.ConvertOptions(
            strings_can_be_null=True,
            null_values=[""],
            column_types=dict.fromkeys(layout.long_integers, pa.string()),
        ),
    )


def _check_distinct(file: DataFile, names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{file.name}: got column {twice[0]!r} more than once; expected it once. Rename one.")


def _read_footers(files: list[DataFile], columns: dict[str, ColumnProfile]) -> int:
    """Return the number of all rows; set the bounds of the columns."""
    total = 0
    bounds: dict[str, list[Any]] = {}
    for file in files:
        with file.open() as stream:
            footer = parquet.ParquetFile(stream).metadata
        total += footer.num_rows
        for group in range(footer.num_row_groups):
            for index in range(footer.num_columns):
                chunk = footer.row_group(group).column(index)
                found = chunk.statistics
                known = found is not None and found.has_min_max
                bounds.setdefault(chunk.path_in_schema, []).extend((found.min, found.max) if known else (None,))
    for name, values in bounds.items():
        if name in columns and None not in values:
            columns[name].low, columns[name].high = min(values), max(values)
    return total
