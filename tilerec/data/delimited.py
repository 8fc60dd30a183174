"""Reader of delimited text (CSV, TSV; plain or gzip) in blocks, with errors that name the line and the column.

Glossary
    block    consecutive whole lines, at most about `block_bytes` long; memory holds one block at a time
    column   a name, a kind and the allowed values
    bad row  a line with too few or too many columns, with a value that its column does not allow, or of too many bytes

Arrow parses each block. If Arrow rejects a block, or a value is outside its column's bounds, a second parser reads the
block line by line, and its errors describe the bad row. Both parsers give the same rows for a block without bad rows.
A line ends at every newline. Quotes have a meaning with `quotes=True` only: a field that begins with a quote may hold
delimiters until the next quote, and two quotes inside of it stand for one. A bad row whose quotes do not end on its
line reaches to the line that ends them, `max_line_bytes` at most: none of these lines becomes a row of its own.
"""

from __future__ import annotations

import difflib
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as arrow_csv

from tilerec.errors import ConfigError, InputError

OnBadRow = Literal["error", "skip"]
NumberArray = npt.NDArray[np.int64] | npt.NDArray[np.float64] | npt.NDArray[np.bool_]

_INTEGER = re.compile(rb"[ \t]*-?[0-9]+[ \t]*")
# No two adjacent parts match the same bytes, so the time is linear in the length of a field.
_NUMBER = re.compile(rb"[ \t]*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*")
_QUOTED = re.compile(rb'"([^"]*(?:""[^"]*)*)"')
_SHOWN_BYTES = 80
_KEPT_EXAMPLES = 5


class ColumnKind(Enum):
    """Type of a column's values."""

    INTEGER = "an integer"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    TEXT = "text"


@dataclass(frozen=True)
class Column:
    """One column to read.

    Attributes:
        name: its name in the header; without a header, its name in blocks.
        kind: type of its values.
        optional: an empty field is a missing value instead of a bad row. Empty text is never a bad row.
        low, high: inclusive bounds of integers and numbers.
    """

    name: str
    kind: ColumnKind
    optional: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def wanted(self) -> str:
        """Description of the allowed values, for messages."""
        text = self.kind.value
        if self.low is not None and self.high is not None:
            text += f" in [{self.low:g}, {self.high:g}]"
        elif self.low is not None:
            text += f" of at least {self.low:g}"
        elif self.high is not None:
            text += f" of at most {self.high:g}"
        return text + (" or nothing" if self.optional else "")


@dataclass(frozen=True)
class Block:
    """The good rows of one block of lines.

    Attributes:
        lines: int64, the 1-based line number of every row.
        numbers: int64, float64 or bool values of each integer, number or boolean column; 0 where missing.
        missing: bool mask of the missing values of each optional column in `numbers`.
        texts: values of each text column as an Arrow binary array.
    """

    lines: npt.NDArray[np.int64]
    numbers: dict[str, NumberArray]
    missing: dict[str, npt.NDArray[np.bool_]]
    texts: dict[str, pa.BinaryArray]

    def __len__(self) -> int:
        return len(self.lines)


@dataclass
class RowCount:
    """Counts of one pass over a file.

    Attributes:
        rows: good rows.
        skipped: bad rows left out.
        examples: error messages of the first few bad rows.
        bytes_read: position of the pass in the stored (possibly compressed) file.
    """

    rows: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    bytes_read: int = 0

    def skip(self, message: str) -> None:
        self.skipped += 1
        if len(self.examples) < _KEPT_EXAMPLES:
            self.examples.append(message)


@dataclass
class BrokenRow:
    """The bad row that a pass is in, if the quotes of its first line do not end there.

    Attributes:
        line: number of that line; 0 outside of such a row.
        size: bytes of the row so far.
    """

    line: int = 0
    size: int = 0


class DelimitedFile:
    """A delimited text file, read in blocks of bounded size.

    Args:
        path: the file; gzip is recognised by its first bytes, not by its name.
        columns: the columns to read. With a header they may be in any order among others. Without one they must be all
            columns of the file, in order.
        delimiter: one character.
        header: True if line 1 names the columns.
        on_bad_row: "error" raises `InputError` at the first bad row; "skip" leaves bad rows out and counts them.
        block_bytes: bytes of text held at a time.
        max_line_bytes: a longer line is a bad row, anywhere in a block. The bytes beyond are not held in memory.
        quotes: True if fields may be in quotes.
    """

    def __init__(
        self,
        path: str | Path,
        columns: tuple[Column, ...],
        *,
        delimiter: str = ",",
        header: bool = True,
        on_bad_row: OnBadRow = "error",
        block_bytes: int = 1 << 22,
        max_line_bytes: int = 1 << 20,
        quotes: bool = False,
    ) -> None:
        if on_bad_row not in ("error", "skip"):
            raise ConfigError(f"on_bad_row: got {on_bad_row!r}; expected 'error' or 'skip'. Choose one.")
        if block_bytes < 1 or max_line_bytes < 1:
            raise ConfigError(
                f"block_bytes and max_line_bytes: got {block_bytes} and {max_line_bytes}; expected at least 1. Leave "
                "them out for the defaults."
            )
        self.path = Path(path)
        self.columns = columns
        self._delimiter = delimiter.encode()
        self._header = header
        self._skip = on_bad_row == "skip"
        self._block_bytes = block_bytes
        self._max_line_bytes = max_line_bytes
        self._quotes = quotes

    def blocks(self, count: RowCount | None = None) -> Iterator[Block]:
        """Yield the blocks of one pass over the file; `count` is updated during the pass."""
        counted = RowCount() if count is None else count
        broken = BrokenRow()
        layout: tuple[str, ...] | None = None
        if not self._header:
            layout = tuple(column.name for column in self.columns)
        for first_line, text in self._texts(counted):
            if layout is None:
                end = text.find(b"\n")
                end = len(text) - 1 if end < 0 else end
                layout = self.read_header(text[: end + 1])
                first_line, text = first_line + 1, text[end + 1 :]
                if not text:
                    continue
            block = self.parse(first_line, text, layout, counted, broken)
            counted.rows += len(block)
            if len(block):
                yield block
        if layout is None:
            raise InputError(
                f"{self.path}: got an empty file; expected a header line naming {self._names()}. Check the path."
            )

    # Lines -----------------------------------------------------------------------------------------------------

    def _texts(self, count: RowCount) -> Iterator[tuple[int, bytes]]:
        """Yield (number of the first line, whole lines) to the end of the file; of a too long line, only its start."""
        line = 1
        rest = b""
        most = self._max_line_bytes + 2  # one byte too many even if the last is a carriage return
        with self._open() as stream:
            while chunk := self._chunk(stream, line):
                count.bytes_read = stream.compressed_position() if isinstance(stream, _Gzip) else stream.tell()
                if line == 1 and not rest:
                    chunk = chunk.removeprefix(b"\xef\xbb\xbf")
                if len(rest) == most:
                    end = chunk.find(b"\n")
                    chunk = b"" if end < 0 else chunk[end:]
                end = chunk.rfind(b"\n") + 1
                if end:
                    text = rest + chunk[:end]
                    rest = chunk[end:]
                    yield line, text
                    line += text.count(b"\n")
                else:
                    rest += chunk
                rest = rest[:most]
                if len(rest) == most and not self._skip:
                    break  # the error needs only the start of the line
        if rest:
            yield line, rest

    def _has_long_line(self, text: bytes) -> bool:
        """Return True if a line is longer than allowed. Checks one position per `max_line_bytes`, not each line."""
        start = 0
        while len(text) - start > self._max_line_bytes:
            end = text.rfind(b"\n", start, start + self._max_line_bytes + 1)
            if end < 0:
                return True
            start = end + 1
        return False

    def _chunk(self, stream: BinaryIO | _Gzip, line: int) -> bytes:
        """Return about `block_bytes` of text, empty at the end of the file; `line` is the number of its first line."""
        parts: list[bytes] = []
        size = 0
        # read1 returns the bytes before damaged data, so that the error can name the line.
        while size < self._block_bytes:
            try:
                part = stream.read1(self._block_bytes - size)  # type: ignore[union-attr]
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                line += sum(part.count(b"\n") for part in parts)
                raise InputError(
                    f"{self.path}:{line}: got compressed data that breaks off or is damaged in this line or after it "
                    f"({error}); expected a complete file. Download it again."
                ) from error
            if not part:
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    def _open(self) -> BinaryIO | _Gzip:
        try:
            stream = self.path.open("rb")
        except OSError as error:
            raise InputError(
                f"{self.path}: got {error.strerror!r} on opening it; expected a readable file. Check the path."
            ) from error
        magic = stream.read(2)
        stream.seek(0)
        if magic == b"\x1f\x8b":
            return _Gzip(stream)
        return stream

    def _names(self) -> str:
        names = [column.name for column in self.columns]
        shown = names if len(names) <= 6 else [*names[:3], "…", names[-1]]
        return ", ".join(shown)

    def read_header(self, line: bytes) -> tuple[str, ...]:
        """Return the column names of a header line; raise `InputError` unless it has each wanted column once."""
        if len(line.rstrip(b"\r\n")) > self._max_line_bytes:
            raise self._too_long(1, line)
        layout = header_names(line, self._delimiter, quotes=self._quotes)
        for column in self.columns:
            if layout.count(column.name) == 1:
                continue
            if column.name in layout:
                raise InputError(
                    f"{self.path}:1: got column {column.name!r} more than once in the header; expected it once. "
                    "Rename one."
                )
            near = difflib.get_close_matches(column.name, layout, 1)
            hint = f"Did you mean {near[0]!r}?" if near else "Name the columns of the file."
            raise InputError(f"{self.path}:1: got header {_shown(line)}; expected a column {column.name!r}. {hint}")
        return layout

    # Blocks to rows --------------------------------------------------------------------------------------------

    def parse(
        self,
        first_line: int,
        text: bytes,
        layout: tuple[str, ...],
        count: RowCount | None = None,
        broken: BrokenRow | None = None,
    ) -> Block:
        """Return the rows of whole lines of the file.

        Args:
            first_line: number of the first line.
            text: the lines.
            layout: names of all columns of a line.
            count: bad rows that are skipped are added to it.
            broken: the bad row that the line before was in, which may go on; it becomes that of the last line.
        """
        block = None if broken is not None and broken.line else self._parse_fast(first_line, text, layout)
        if block is None:
            block = self._parse_lines(first_line, text, layout, count or RowCount(), broken or BrokenRow())
        return block

    def _parse_fast(self, first_line: int, text: bytes, layout: tuple[str, ...]) -> Block | None:
        """Return the rows of a block parsed by Arrow; None if Arrow or a bound detects a bad row."""
        if self._has_long_line(text):
            return None
        if any(column.kind is ColumnKind.INTEGER for column in self.columns) and (b"x" in text or b"X" in text):
            return None  # Arrow would accept 0x1F as an integer
        if len(layout) > 1 and (text[:1] in b"\r\n" or b"\n\n" in text or b"\n\r\n" in text):
            return None  # Arrow would fill an empty line with empty columns
        quoted = self._quotes and b'"' in text
        if quoted and text.count(b"\r") != text.count(b"\r\n"):
            return None  # lines that Arrow ends there could make up for newlines in quotes in the count of rows
        last = text[text.rfind(b"\n", 0, len(text) - 1) + 1 :]
        if quoted and split_fields(last, self._delimiter) is None:
            return None  # Arrow would end the quotes at the end of the block
        rows = text.count(b"\n") + (not text.endswith(b"\n"))
        types = {
            ColumnKind.INTEGER: pa.int64(),
            ColumnKind.NUMBER: pa.float64(),
            ColumnKind.BOOLEAN: pa.bool_(),
            ColumnKind.TEXT: pa.binary(),
        }
        # Columns outside `self.columns` get names that cannot collide with the names there.
        wanted = {column.name for column in self.columns}
        names = [name if name in wanted else f"\0{index}" for index, name in enumerate(layout)]
        try:
            table = arrow_csv.read_csv(
                pa.BufferReader(text),
                read_options=arrow_csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=self._delimiter.decode(),
                    quote_char='"' if quoted else False,
                    double_quote=quoted,
                    newlines_in_values=False,
                    ignore_empty_lines=False,
                ),
                convert_options=arrow_csv.ConvertOptions(
                    check_utf8=False,
                    column_types={column.name: types[column.kind] for column in self.columns},
                    null_values=[""],
                    strings_can_be_null=False,
                    include_columns=[column.name for column in self.columns],
                ),
            )
        except pa.ArrowInvalid:
            return None
        if table.num_rows != rows:  # Arrow also ends a line at a carriage return without a newline
            return None
        numbers: dict[str, NumberArray] = {}
        missing: dict[str, npt.NDArray[np.bool_]] = {}
        texts: dict[str, pa.BinaryArray] = {}
        for column in self.columns:
            array = table.column(column.name).combine_chunks()
            if column.kind is ColumnKind.TEXT:
                texts[column.name] = array
                continue
            absent = np.asarray(array.is_null())
            if absent.any() and not column.optional:
                return None
            values = array.fill_null(pa.scalar(False).cast(array.type)).to_numpy(zero_copy_only=False)
            if not np.isfinite(values).all() or not _within(values[~absent], column):
                return None
            numbers[column.name] = values
            if column.optional:
                missing[column.name] = absent
        return Block(np.arange(first_line, first_line + rows, dtype=np.int64), numbers, missing, texts)

    def _parse_lines(
        self, first_line: int, text: bytes, layout: tuple[str, ...], count: RowCount, broken: BrokenRow
    ) -> Block:
        """Return the good rows of a block parsed line by line; a bad row raises or is counted."""
        places = [(layout.index(column.name), column) for column in self.columns]
        kept: list[list[int | float | bytes | None]] = []
        numbers_of_lines: list[int] = []
        raw_lines = text.split(b"\n")
        if not raw_lines[-1]:
            raw_lines.pop()
        for offset, raw in enumerate(raw_lines):
            number = first_line + offset
            if broken.line and self._is_rest(number, raw, count, broken):
                continue
            try:
                kept.append(self._parse_line(number, raw.removesuffix(b"\r"), layout, places))
            except InputError as error:
                if not self._skip:
                    raise
                count.skip(str(error))
                if self._quotes and len(raw) <= self._max_line_bytes and split_fields(raw, self._delimiter) is None:
                    broken.line, broken.size = number, len(raw)
                continue
            numbers_of_lines.append(number)
        numbers: dict[str, NumberArray] = {}
        missing: dict[str, npt.NDArray[np.bool_]] = {}
        texts: dict[str, pa.BinaryArray] = {}
        for index, column in enumerate(self.columns):
            values = [row[index] for row in kept]
            if column.kind is ColumnKind.TEXT:
                texts[column.name] = pa.array(values, pa.binary())
                continue
            filled = [0 if value is None else value for value in values]
            numbers[column.name] = np.array(filled, _DTYPES[column.kind])
            if column.optional:
                missing[column.name] = np.array([value is None for value in values], np.bool_)
        return Block(np.array(numbers_of_lines, np.int64), numbers, missing, texts)

    def _is_rest(self, number: int, raw: bytes, count: RowCount, broken: BrokenRow) -> bool:
        """Return True, and count it, if a line is a part of the broken row."""
        broken.size += len(raw) + 1
        if broken.size > self._max_line_bytes:  # no row is that long: the quote was a stray one
            broken.line = 0
            return False
        count.skip(
            f"{self.path}:{number}: got {_shown(raw)}, inside of the quotes that begin on line {broken.line}; "
            f"expected a line for each row. {_NEXT_MOVE}"
        )
        if raw.count(b'"') % 2:  # quotes within a field come in pairs
            broken.line = 0
        return True

    def _parse_line(
        self, number: int, raw: bytes, layout: tuple[str, ...], places: list[tuple[int, Column]]
    ) -> list[int | float | bytes | None]:
        if len(raw) > self._max_line_bytes:
            raise self._too_long(number, raw)
        fields = split_fields(raw, self._delimiter) if self._quotes else raw.split(self._delimiter)
        if fields is None:
            raise InputError(
                f"{self.path}:{number}: got {_shown(raw)}, with a field in quotes that does not end on its line; "
                f"expected a line for each row. {_NEXT_MOVE}"
            )
        if len(fields) < len(layout):
            name = layout[len(fields)]
            raise InputError(
                f"{self.path}:{number}: got {_shown(raw)}, where column {name!r} is missing; expected "
                f"{len(layout)} columns instead of {len(fields)}. {_NEXT_MOVE}"
            )
        if len(fields) > len(layout):
            raise InputError(
                f"{self.path}:{number}: got {_shown(fields[len(layout)])} after the last column {layout[-1]!r}: the"
                f" line has {len(fields)} columns; expected {len(layout)}. {_NEXT_MOVE}"
            )
        return [self._parse_field(number, fields[place], column) for place, column in places]

    def _too_long(self, number: int, start: bytes) -> InputError:
        return InputError(
            f"{self.path}:{number}: got a line that is longer than {self._max_line_bytes:,} bytes and begins"
            f" {_shown(start[:_SHOWN_BYTES])}; expected a line of a text file with columns {self._names()}."
            f" {_NEXT_MOVE}"
        )

    def _parse_field(self, number: int, text: bytes, column: Column) -> int | float | bytes | None:
        if column.kind is ColumnKind.TEXT:
            return text
        if not text and column.optional:
            return None
        value: int | float | None = None
        if column.kind is ColumnKind.INTEGER:
            # Every int64 has at most 19 digits; longer texts would only be slow to parse.
            if _INTEGER.fullmatch(text) and len(text.strip()) <= 20 and -(2**63) <= int(text) < 2**63:
                value = int(text)
        elif column.kind is ColumnKind.BOOLEAN:
            value = _BOOLEANS.get(text)
        elif _NUMBER.fullmatch(text) and np.isfinite(float(text)):
            value = float(text)
        low_ok = value is not None and (column.low is None or value >= column.low)
        if value is None or not low_ok or (column.high is not None and value > column.high):
            raise InputError(
                f"{self.path}:{number}: column {column.name!r}: got {_shown(text)}; expected {column.wanted}."
                f" {_NEXT_MOVE}"
            )
        return value


_NEXT_MOVE = (
    "Fix the line, or set on_bad_row='skip' to leave such lines out and count them (for the files of a run: tilerec "
    "data convert --on-bad-row skip)."
)


_DTYPES = {ColumnKind.INTEGER: np.int64, ColumnKind.NUMBER: np.float64, ColumnKind.BOOLEAN: np.bool_}
_BOOLEANS = {
    **dict.fromkeys((b"1", b"true", b"True", b"TRUE"), True),
    **dict.fromkeys((b"0", b"false", b"False", b"FALSE"), False),
}
"""Those of Arrow."""


def header_names(line: bytes, delimiter: bytes, *, quotes: bool) -> tuple[str, ...]:
    """Return the names in a header line, without a byte order mark, quotes and spaces around them."""
    text = line.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf")
    fields = (split_fields(text, delimiter) if quotes else None) or text.split(delimiter)
    return tuple(field.decode("utf-8", "replace").strip() for field in fields)


def split_fields(line: bytes, delimiter: bytes) -> list[bytes] | None:
    """Return the fields of a line, of which some may be in quotes; None if a quoted field does not end.

    The line `a,"b,c",d` has the fields `a`, `b,c` and `d`. Other quotes are a part of their field, and so is the text
    between a closing quote and the next delimiter.
    """
    fields: list[bytes] = []
    at = 0
    while True:
        text = b""
        if line[at : at + 1] == b'"':
            found = _QUOTED.match(line, at)
            if found is None:
                return None
            text, at = found[1].replace(b'""', b'"'), found.end()
        end = line.find(delimiter, at)
        fields.append(text + (line[at:] if end < 0 else line[at:end]))
        if end < 0:
            return fields
        at = end + len(delimiter)


class _Gzip(gzip.GzipFile):
    """A gzip stream that also closes its underlying file."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(fileobj=stream, mode="rb")
        self._compressed = stream

    def compressed_position(self) -> int:
        """Return the number of bytes read from the underlying file."""
        return self._compressed.tell()

    def close(self) -> None:
        super().close()
        self._compressed.close()


def _within(values: NumberArray, column: Column) -> bool:
    if not len(values):
        return True
    above = column.low is None or bool(values.min() >= column.low)
    return above and (column.high is None or bool(values.max() <= column.high))


def _shown(text: bytes) -> str:
    """Return bytes as a quoted string, truncated to `_SHOWN_BYTES`."""
    cut = text.rstrip(b"\r\n")
    shown = repr(cut[:_SHOWN_BYTES].decode("utf-8", "replace"))
    return shown if len(cut) <= _SHOWN_BYTES else f"{shown} … ({len(cut):,} bytes)"
