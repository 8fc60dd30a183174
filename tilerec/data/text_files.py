"""`DelimitedGroups`: CSV and TSV files as row groups, for reading in any order.

The constructor counts the lines of the files once, block by block. A block of whole lines is a row group. Types of the
columns follow from the first rows; a later value of another type is an error that names the line. An empty field is a
missing value. Fields may be in quotes, except in files with tabs; a row ends at the end of its line even so.

Text takes several times longer to read than Parquet. Convert it once (`tilerec data convert`) if you train on it more
than once. Compressed files have no places to begin at, so they must be converted.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow
import pyarrow.csv as arrow_csv

from tilerec.data.columns import nearest
from tilerec.data.delimited import Block, Column, ColumnKind, DelimitedFile, OnBadRow, header_names
from tilerec.data.file_list import DataFile, Paths, list_files
from tilerec.data.row_groups import GroupReader, RowGroups
from tilerec.errors import ConfigError, InputError

ENDINGS = (".csv", ".tsv", ".txt")
DELIMITERS = (",", "\t", ";", "|")
_SAMPLE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_ARROW_TYPES = {
    ColumnKind.INTEGER: pa.int64(),
    ColumnKind.NUMBER: pa.float64(),
    ColumnKind.BOOLEAN: pa.bool_(),
    ColumnKind.TEXT: pa.binary(),
}


@dataclass(frozen=True)
class ListColumn:
    """A text column whose fields are lists of ids.

    Attributes:
        column: its name.
        separator: text between the ids.
    """

    column: str
    separator: str


class TextLayout:
    """Columns of delimited files and their types, from the first lines of a file.

    Args:
        file: the first file.
        delimiter: between fields; "": the most frequent one of comma, tab, semicolon and bar in the first line.
        names: of the columns; () reads them from the first line.
        lists: columns with several ids in a field.
        texts: columns that are text even if they look like numbers, such as hexadecimal ids. Whole numbers that int64
            cannot hold are text, too.
        id_types: columns of ids, or of lists of them, whose type is known ("integer" or "text"); columns that the file
            lacks are ignored.
        compressed: accept gzip, which can only be read from its start.
    """

    def __init__(
        self,
        file: DataFile,
        *,
        delimiter: str = "",
        names: Sequence[str] = (),
        lists: Sequence[ListColumn] = (),
        texts: Sequence[str] = (),
        id_types: Mapping[str, str] | None = None,
        compressed: bool = False,
    ) -> None:
        if delimiter and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0'):
            raise ConfigError(
                f"delimiter: got {delimiter!r}; expected one ASCII character other than a quote and the end of a line. "
                "Leave it out to take it from the first line."
            )
        sample = _start(file, compressed)
        line, _, rest = sample.partition(b"\n")
        if b"\0" in line:
            raise InputError(
                f"{file.name}: got a first line with null bytes, as in UTF-16 or binary files; expected text in "
                "UTF-8. "
                "Convert the file's encoding first, for example with iconv."
            )
        first = line.decode("utf-8", "replace")
        self.delimiter = delimiter or max(DELIMITERS, key=first.count)
        self.quotes = self.delimiter != "\t"
        self.header = not names
        self.names = tuple(names) or header_names(line, self.delimiter.encode(), quotes=self.quotes)
        twice = [name for name in self.names if self.names.count(name) > 1]
        if twice or not all(self.names):
            what = f"the name {twice[0]!r} twice" if twice else "an empty name"
            raise InputError(
                f"{file.name}: got {what} in the first line; expected one name per column. Correct the line, or pass "
                "the names."
            )
        self.lists = {one.column: one.separator for one in lists}
        self._texts = {*texts, *self.lists}
        unknown = sorted(self._texts - set(self.names))
        if unknown:
            raise ConfigError(
                f"{file.name}: got list or text column {unknown[0]!r}, which is not there; "
                f"{nearest(unknown[0], self.names)}"
            )
        known = {name: kind for name, kind in (id_types or {}).items() if name in self.names}
        self._texts |= {name for name, kind in known.items() if kind == "text"}
        self._read_types(rest if self.header else sample, {n for n, kind in known.items() if kind == "integer"})
        for name in self.lists.keys() & known.keys():
            self.list_types[name] = pa.list_(pa.int64() if known[name] == "integer" else pa.binary())

    def _read_types(self, rows: bytes, integers: Set[str]) -> None:
        kinds = dict.fromkeys(self.names, ColumnKind.TEXT)
        self.times: dict[str, str] = {}  # the first text of each column of times
        self.long_integers: list[str] = []
        self.list_types = {name: pa.list_(pa.int64()) for name in self.lists}
        if rows:
            table = self._parsed(rows, self._texts)
            self.times = {
                name: self._first_text(rows, name)
                for name, column in zip(self.names, table.columns, strict=True)
                if pa.types.is_timestamp(column.type)
            }
            for name, column in zip(self.names, table.columns, strict=True):
                if name in self.lists:
                    words = _split(column.combine_chunks().cast(pa.binary()), self.lists[name]).flatten()
                    if not _are_integers(words):
                        self.list_types[name] = pa.list_(pa.binary())
                elif pa.types.is_integer(column.type):
                    kinds[name] = ColumnKind.INTEGER
                elif pa.types.is_floating(column.type):
                    kinds[name] = ColumnKind.NUMBER
                    if arrow.max(arrow.abs(column)).as_py() >= 2**63:
                        self.long_integers.append(name)
                elif pa.types.is_boolean(column.type):
                    kinds[name] = ColumnKind.BOOLEAN
            # Whole numbers beyond int64 are ids: as float64, different ones would be equal.
            self.long_integers = [name for name in self.long_integers if self._are_long_integers(rows, name)]
            kinds.update(dict.fromkeys(self.long_integers, ColumnKind.TEXT))
        # The parser names the first field that is no integer.
        kinds.update({n: ColumnKind.INTEGER for n in integers - self.lists.keys() if kinds[n] is ColumnKind.TEXT})
        self.columns = self._columns(kinds)

    def _are_long_integers(self, rows: bytes, name: str) -> bool:
        fields = self._parsed(rows, {name}).column(name)
        return bool(arrow.all(arrow.match_substring_regex(fields, r"^-?[0-9]+$")).as_py())

    def _first_text(self, rows: bytes, name: str) -> str:
        texts = self._parsed(rows, {name}).column(name).drop_null()
        return texts[0].as_py().decode() if len(texts) else ""

    def _parsed(self, rows: bytes, texts: Set[str]) -> pa.Table:
        return arrow_csv.read_csv(
            pa.BufferReader(rows),
            read_options=arrow_csv.ReadOptions(
                use_threads=False, block_size=len(rows) + 1, column_names=list(self.names)
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char='"' if self.quotes else False,
                double_quote=self.quotes,
                ignore_empty_lines=False,
                invalid_row_handler=lambda row: "skip",  # the strict parser names it when it reads the rows
            ),
            convert_options=arrow_csv.ConvertOptions(
                check_utf8=False,
                null_values=[""],
                strings_can_be_null=True,
                column_types={name: pa.binary() for name in texts},
            ),
        )

    def _columns(self, kinds: dict[str, ColumnKind]) -> tuple[Column, ...]:
        return tuple(Column(name, kind, optional=kind is not ColumnKind.TEXT) for name, kind in kinds.items())

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns of `table`."""
        return pa.schema(
            [(column.name, self.list_types.get(column.name, _ARROW_TYPES[column.kind])) for column in self.columns]
        )

    def parser(self, file: DataFile, names: Sequence[str] = (), on_bad_row: OnBadRow = "error") -> DelimitedFile:
        """Return the parser of some columns of a file; all without `names`."""
        columns = tuple(column for column in self.columns if not names or column.name in names)
        return DelimitedFile(
            Path(file.path),
            columns,
            delimiter=self.delimiter,
            header=self.header,
            on_bad_row=on_bad_row,
            quotes=self.quotes,
        )

    def table(self, block: Block, where: str) -> pa.Table:
        """Return the rows of a block; empty fields are null, and empty lists are empty."""
        arrays: dict[str, pa.Array] = {}
        for name, values in block.numbers.items():
            arrays[name] = pa.array(values, mask=block.missing.get(name))
        for name, texts in block.texts.items():
            if name not in self.lists:
                full = arrow.greater(arrow.binary_length(texts), 0)
                arrays[name] = arrow.if_else(full, texts, pa.scalar(None, texts.type))
                continue
            words = _split(texts, self.lists[name])
            if self.list_types[name].value_type == pa.int64():
                if not _are_integers(words.flatten()):
                    raise InputError(
                        f"{where}: column {name!r}: got a list with text; expected integers, as in the first rows. "
                        "Correct it, or put a text into the first rows."
                    )
                values = words.flatten().cast(pa.string()).cast(pa.int64())
                words = pa.ListArray.from_arrays(words.offsets, values)
            arrays[name] = words
        return pa.table(arrays)


class DelimitedGroups(RowGroups):
    """Blocks of lines of CSV and TSV files, in the order of the files.

    Args:
        paths: a file, a folder, a pattern, a URL, or a list of them (`file_list.py`).
        base: folder of relative local paths.
        delimiter, names, lists, texts, id_types: see `TextLayout`.
        block_bytes: bytes of text in a row group.

    Raises:
        InputError: there are no files or rows, or a file is compressed.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        base: str = "",
        delimiter: str = "",
        names: Sequence[str] = (),
        lists: Sequence[ListColumn] = (),
        texts: Sequence[str] = (),
        id_types: Mapping[str, str] | None = None,
        block_bytes: int = 1 << 23,
    ) -> None:
        self.files = list_files(paths, ENDINGS, base=base)
        self.name = self.files[0].name if len(self.files) == 1 else f"{len(self.files)} text files"
        self._layout = TextLayout(
            self.files[0], delimiter=delimiter, names=names, lists=lists, texts=texts, id_types=id_types
        )
        self.schema = self._layout.schema
        blocks = [
            (number, *block) for number, file in enumerate(self.files) for block in self._index(file, block_bytes)
        ]
        self.group_files = tuple(block[0] for block in blocks)
        self._starts = tuple(block[1] for block in blocks)
        self._sizes = tuple(block[2] for block in blocks)
        self._lines = tuple(block[3] for block in blocks)
        self.group_rows = tuple(block[4] for block in blocks)
        if not blocks:
            raise InputError(f"{self.files[0].name}: got {self.name} without rows; expected data. Check the path.")

    def _index(self, file: DataFile, block_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (start, bytes, number of the first line, rows) of each block of a file."""
        with file.open() as stream:
            start, line = 0, 1
            if self._layout.header:
                start, line = len(stream.readline()), 2
                stream.seek(start)
            rest = b""
            while chunk := stream.read(block_bytes):
                text = rest + chunk
                end = text.rfind(b"\n") + 1
                if end:
                    rows = text.count(b"\n")
                    yield start, end, line, rows
                    start, line, text = start + end, line + rows, text[end:]
                rest = text
            if rest:
                yield start, len(rest), line, 1

    def key_type(self, column: str) -> pa.DataType:
        return stored_type(self.schema.field(column).type)

    def where(self, group: int) -> str:
        first = self._lines[group]
        return f"{self.files[self.group_files[group]].name}, lines {first} to {first + self.group_rows[group] - 1}"

    @contextmanager
    def open(self, group: int) -> Iterator[GroupReader]:
        yield _BlockReader(self, group)

    def check_columns(self, columns: Sequence[str]) -> None:
        if not self._layout.header:
            return
        for file in self.files[1:]:
            with file.open() as stream:
                header = stream.readline().removeprefix(b"\xef\xbb\xbf")
            if header and self._layout.parser(file).read_header(header) != self._layout.names:
                raise InputError(
                    f"{file.name}: got the header {header[:80].decode('utf-8', 'replace')!r}; expected that of "
                    f"{self.files[0].name}. Write the files with one header."
                )

    def read_block(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Parse columns of a block."""
        file = self.files[self.group_files[group]]

        def read() -> bytes:
            with file.open() as stream:
                stream.seek(self._starts[group])
                text = stream.read(self._sizes[group])
            if len(text) != self._sizes[group]:
                raise OSError(f"got {len(text)} bytes; expected {self._sizes[group]}")
            return text

        try:
            text = file.attempt(read, (OSError,))
        except OSError as error:
            raise InputError(
                f"{self.where(group)}: got an error on reading it ({error}); expected a readable file. Check it."
            ) from error
        block = self._layout.parser(file, columns).parse(self._lines[group], text, self._layout.names)
        return self._layout.table(block, self.where(group)).select(list(columns))


class _BlockReader(GroupReader):
    def __init__(self, source: DelimitedGroups, group: int) -> None:
        self._source, self._group = source, group

    def read(self, columns: Sequence[str]) -> pa.Table:
        return self._source.read_block(self._group, columns)


def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column in Parquet files: text instead of bytes."""
    if pa.types.is_list(kind):
        return pa.list_(stored_type(kind.value_type))
    return pa.string() if pa.types.is_binary(kind) else kind


def _start(file: DataFile, compressed: bool) -> bytes:
    """Return the first whole lines of a file."""
    try:
        with file.open() as stream:
            sample = stream.read(_SAMPLE_BYTES)
            if compressed and sample[:2] == _GZIP:
                stream.seek(0)
                with gzip.open(stream) as text:
                    sample = text.read(_SAMPLE_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{file.name}: got an error on reading its start ({error}); expected a whole, readable file. Check the "
            "path, or copy the file again."
        ) from error
    if sample[:2] == _GZIP:
        raise InputError(
            f"{file.name}: got gzip; expected plain text, which can be read from any place. Convert it once: tilerec "
            "data convert FILE --out FILE.parquet."
        )
    if not sample.strip():
        raise InputError(f"{file.name}: got an empty file; expected lines of text. Check the path.")
    return sample if len(sample) < _SAMPLE_BYTES else sample[: sample.rfind(b"\n") + 1] or sample


def _split(texts: pa.Array, separator: str) -> pa.ListArray:
    """Return the words of each text; empty words are left out."""
    parts = arrow.split_pattern(texts.fill_null(b""), separator.encode())
    words = parts.flatten()
    full_N = arrow.binary_length(words).to_numpy(zero_copy_only=False) > 0
    offsets = parts.offsets.to_numpy()
    running = np.concatenate([[0], np.cumsum(full_N)])
    return pa.ListArray.from_arrays(
        pa.array(running[offsets - offsets[0]].astype(np.int32)), words.filter(pa.array(full_N))
    )


def _are_integers(words: pa.Array) -> bool:
    return bool(arrow.all(arrow.match_substring_regex(words, r"^-?[0-9]{1,18}$")).as_py() in (True, None))
