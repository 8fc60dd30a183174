"""Ids of sparse features in files and batches, read block by block for counting.

    source          columns                                                  ids
    Criteo          26 categories of each line                               their text; an empty field is no id
    MovieLens       userId, movieId of `ratings.csv`                         their text
    delimited       the columns that `features` names, one header line       their text, split at `separator`
    Parquet         columns of integers, text, or lists of them              unchanged integers, or their text
    batches         every key of a `Batch`                                   table rows

Legend: n samples of a block, N ids.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as arrow
import pyarrow.parquet as parquet

from tilerec.data.batch import Batch
from tilerec.data.criteo import SPARSE
from tilerec.data.delimited import Column, ColumnKind, DelimitedFile, OnBadRow, RowCount, header_names
from tilerec.errors import ConfigError, InputError

Format = Literal["auto", "criteo", "movielens", "delimited", "parquet"]
FORMATS = ("auto", "criteo", "movielens", "delimited", "parquet")
_PARQUET_ROWS = 1 << 15
_PARQUET_BYTES = 1 << 20  # bytes of a column's compressed pages read at a time: row groups may have any size
_CRITEO_COLUMNS = ("Label", *(f"I{i}" for i in range(1, 14)), *SPARSE)


@dataclass(frozen=True)
class Ids:
    """One feature's ids in one block.

    Attributes:
        values: int64 [N], or N texts.
        lengths: int64 [n], number of ids of each sample.
    """

    values: npt.NDArray[np.int64] | pa.BinaryArray
    lengths: npt.NDArray[np.int64]


@dataclass
class Progress:
    """Progress of a pass: `done` of `total` (bytes or rows; a total of 0 is unknown)."""

    done: int = 0
    total: int = 0


class IdSource(ABC):
    """Source of ids, read once.

    Attributes:
        name: the source's name, for display.
        table_rows: True if ids are rows of tables; False if they are raw values that training maps to rows.
        progress, count: updated while `blocks` is read.
    """

    def __init__(self, name: str, *, table_rows: bool = False, total: int = 0) -> None:
        self.name = name
        self.table_rows = table_rows
        self.progress = Progress(total=total)
        self.count = RowCount()

    @abstractmethod
    def blocks(self) -> Iterator[dict[str, Ids]]:
        """Yield the ids of each feature in one pass, in blocks of bounded size."""


def open_ids(
    path: str | Path,
    *,
    format: Format = "auto",
    features: Sequence[str] = (),
    separator: str = "",
    on_bad_row: OnBadRow = "error",
    block_bytes: int = 1 << 22,
) -> IdSource:
    """Return the source of the ids of a data set on disk.

    Args:
        path: a file; a folder with `ratings.csv`; or a folder of Parquet files, read in the order of their names.
        format: "auto" detects it by name and first line: Parquet by `.parquet`, MovieLens and Criteo by their columns,
            else delimited.
        features: columns to count; required for delimited files only. The delimiter is the most frequent character in
            the header line among comma, tab, semicolon and bar.
        separator: text between the ids of one field of a delimited file; "": a field is one id.
        on_bad_row: "error", or "skip" to leave out and count lines with too few or too many columns.
        block_bytes: bytes of text held at a time.

    Raises:
        ConfigError: an unknown format or column, a column named twice, or a separator for Parquet.
        InputError: the file does not exist, or has another format.
    """
    if format not in FORMATS:
        raise ConfigError(f"format: got {format!r}; expected one of {list(FORMATS)}. Choose one.")
    twice = sorted(name for name, count in Counter(features).items() if count > 1)
    if twice:
        raise ConfigError(f"features: got {twice[0]!r} more than once; expected each column once. Leave one out.")
    place = Path(path)
    files = [place]
    if place.is_dir():
        files = sorted(place.glob("*.parquet"))
        if (place / "ratings.csv").is_file() and format in ("auto", "movielens", "delimited"):
            files = [place / "ratings.csv"]
        if not files:
            raise InputError(
                f"{place}: got a folder without ratings.csv or *.parquet; expected one of them. Pass a file in it."
            )
    if format == "parquet" or (format == "auto" and files[0].suffix == ".parquet"):
        if separator:
            raise ConfigError(
                f"{files[0]}: got separator={separator!r} for Parquet, where lists hold several ids; expected it for "
                "delimited text. Leave it out."
            )
        return _ParquetIds(files, features)
    file = files[0]
    layout = _header(file)
    # Lines of the Criteo layout without a header begin with the label, and have 40 fields.
    headed = not (
        format in ("auto", "criteo") and len(layout[1]) == len(_CRITEO_COLUMNS) and layout[1][0] in ("0", "1")
    )
    if not headed:
        layout = (b"\t", _CRITEO_COLUMNS)
    if format == "criteo" or (format == "auto" and set(SPARSE) <= set(layout[1])):
        columns: tuple[str, ...] = SPARSE
    elif format == "movielens" or (format == "auto" and {"userId", "movieId", "rating"} <= set(layout[1])):
        columns = ("userId", "movieId")
    else:
        columns = ()
    chosen = tuple(features) or columns
    if not chosen:
        raise ConfigError(
            f"{file}: got no features; expected the columns that hold ids. Name some of {', '.join(layout[1][:20])}: "
            "--features a,b."
        )
    for name in chosen:
        if name not in layout[1]:
            raise _no_column(file, name, layout[1])
    text = DelimitedFile(
        file,
        tuple(Column(name, ColumnKind.TEXT) for name in (chosen if headed else layout[1])),
        delimiter=layout[0].decode(),
        header=headed,
        quotes=layout[0] != b"\t",
        on_bad_row=on_bad_row,
        block_bytes=block_bytes,
    )
    return _DelimitedIds(text, chosen, separator)


class BatchIds(IdSource):
    """Ids of batches: rows of tables, as training reads them.

    Args:
        batches: returns the batches of one pass.
        name: the source's name, for display.
    """

    def __init__(self, batches: Callable[[], Iterable[Batch]], name: str) -> None:
        super().__init__(name, table_rows=True)
        self._batches = batches

    def blocks(self) -> Iterator[dict[str, Ids]]:
        for batch in self._batches():
            features = batch.sparse_features
            block: dict[str, Ids] = {}
            for key in features.keys():  # noqa: SIM118
                one = features[key]
                block[key] = Ids(
                    one.values().cpu().numpy().astype(np.int64, copy=False),
                    one.lengths().cpu().numpy().astype(np.int64),
                )
            self.count.rows += batch.batch_size
            self.progress.done += batch.batch_size
            yield block


class _DelimitedIds(IdSource):
    def __init__(self, file: DelimitedFile, features: Sequence[str], separator: str) -> None:
        super().__init__(str(file.path), total=file.path.stat().st_size)
        self._file, self._features, self._separator = file, features, separator

    def blocks(self) -> Iterator[dict[str, Ids]]:
        for block in self._file.blocks(self.count):
            self.progress.done = self.count.bytes_read
            yield {name: self._ids(block.texts[name]) for name in self._features}
        if not self.count.rows:
            raise InputError(f"{self.name}: got no rows; expected data. Check the path.")

    def _ids(self, texts: pa.BinaryArray) -> Ids:
        lengths_n = arrow.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
        present_n = lengths_n > 0
        if not self._separator:
            values = texts if present_n.all() else texts.filter(pa.array(present_n))
            return Ids(values, present_n.astype(np.int64))
        parts = arrow.split_pattern(texts, self._separator.encode())
        values = parts.flatten()
        counts_n = arrow.list_value_length(parts).to_numpy(zero_copy_only=False).astype(np.int64)
        full_N = arrow.binary_length(values).to_numpy(zero_copy_only=False) > 0
        sample_N = np.repeat(np.arange(len(counts_n)), counts_n)[full_N]
        return Ids(values.filter(pa.array(full_N)), np.bincount(sample_N, minlength=len(counts_n)).astype(np.int64))


class _ParquetIds(IdSource):
    def __init__(self, files: Sequence[Path], features: Sequence[str]) -> None:
        super().__init__(str(files[0] if len(files) == 1 else files[0].parent))
        self._files = files
        self._features: tuple[str, ...] = tuple(features)
        whole: dict[str, tuple[bool, Path]] = {}  # per column: True if it has integers, and the first file
        for path in files:
            with self._open(path) as file:
                self.progress.total += file.metadata.num_rows
                schema = file.schema_arrow
                if not self._features:
                    self._features = tuple(f.name for f in schema if _readable(f.type))
                    if not self._features:
                        raise InputError(
                            f"{path}: got columns {schema.names}; expected one of integers, texts or lists of them."
                        )
                for name in self._features:
                    if name not in schema.names:
                        raise _no_column(path, name, schema.names)
                    if schema.names.count(name) > 1:
                        raise InputError(
                            f"{path}: got column {name!r} more than once; expected it once. Rename one of them."
                        )
                    kind = schema.field(name).type
                    if not _readable(kind):
                        raise ConfigError(
                            f"{path}: column {name!r}: got {kind}; expected integers, texts, or lists of them. "
                            "Choose another one."
                        )
                    integers = pa.types.is_integer(_innermost(kind))
                    before, first = whole.setdefault(name, (integers, path))
                    if integers != before:
                        names = {True: "integers", False: "texts"}
                        raise InputError(
                            f"{path}: column {name!r}: got {names[integers]}; expected {names[before]}, as in {first}. "
                            "Write one type in all files."
                        )

    @staticmethod
    def _open(path: Path) -> parquet.ParquetFile:
        try:
            return parquet.ParquetFile(path, buffer_size=_PARQUET_BYTES, pre_buffer=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(
                f"{path}: got a file that cannot be read as Parquet ({error}); expected Parquet. Check the path."
            ) from error

    def blocks(self) -> Iterator[dict[str, Ids]]:
        for path in self._files:
            with self._open(path) as file:
                for part in self._parts(file, path):
                    self.count.rows += part.num_rows
                    self.progress.done = self.count.rows
                    yield {name: _ids_of_column(part.column(name)) for name in self._features}
        if not self.count.rows:
            raise InputError(f"{self.name}: got no rows; expected data. Check the path.")

    def _parts(self, file: parquet.ParquetFile, path: Path) -> Iterator[pa.RecordBatch]:
        try:
            yield from file.iter_batches(_PARQUET_ROWS, columns=list(self._features), use_threads=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(
                f"{path}: got damage after row {self.progress.done:,} of the data ({error}); expected a whole file. "
                "Download it again."
            ) from error


def _ids_of_column(column: pa.Array) -> Ids:
    values = column
    if _is_list(column.type):
        counts_n = arrow.fill_null(arrow.list_value_length(column), 0)
        lengths_n = counts_n.to_numpy(zero_copy_only=False).astype(np.int64)
        values = column.flatten()
    else:
        lengths_n = np.ones(len(column), np.int64)
    if values.null_count:
        present_N = np.asarray(values.is_valid())
        sample_N = np.repeat(np.arange(len(lengths_n)), lengths_n)[present_N]
        lengths_n = np.bincount(sample_N, minlength=len(lengths_n)).astype(np.int64)
        values = values.drop_null()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_integer(values.type):
        numbers = values.to_numpy(zero_copy_only=False)
        # Unsigned 64-bit ids keep their bits as int64.
        return Ids(numbers.view(np.int64) if numbers.dtype == np.uint64 else numbers.astype(np.int64), lengths_n)
    return Ids(values.cast(pa.binary()), lengths_n)


def _readable(kind: pa.DataType) -> bool:
    if _is_list(kind):
        return not _is_list(kind.value_type) and _readable(kind.value_type)
    if pa.types.is_dictionary(kind):
        return _readable(kind.value_type)
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _innermost(kind: pa.DataType) -> pa.DataType:
    """Return the value type inside lists and dictionaries."""
    return _innermost(kind.value_type) if _is_list(kind) or pa.types.is_dictionary(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _header(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """Return the delimiter and the column names of a file's first line."""
    line = (Column("line", ColumnKind.TEXT),)
    probe = DelimitedFile(path, line, delimiter="\x01", header=False, on_bad_row="skip", block_bytes=1 << 12)
    block = next(probe.blocks(), None)
    if block is None:
        raise InputError(f"{path}: got an empty file; expected a header line. Check the path.")
    first = block.texts["line"][0].as_py()
    delimiter = max((b",", b"\t", b";", b"|"), key=first.count)
    return delimiter, header_names(first, delimiter, quotes=delimiter != b"\t")


def _no_column(path: Path, name: str, there: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(name, there, 1)
    hint = f"Did you mean {near[0]!r}?" if near else "Choose one."
    return ConfigError(f"{path}: got no column {name!r}; expected one of {', '.join(there[:20])}. {hint}")
