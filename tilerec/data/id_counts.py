"""Occurrences of ids in a data set, counted in bounded memory, and the vocabularies of frequent ids.

    row group -> distinct hashes and their counts     in memory, as a sorted run
    too many in memory -> one sorted run on disk
    end -> all runs merged, one range of hashes at a time

Legend: N ids, V distinct ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilerec.data.arrow_values import kind_of, read_values
from tilerec.data.column_checks import check_exists
from tilerec.data.id_types import id_type
from tilerec.data.row_groups import RowGroups
from tilerec.data.rows import hash_values
from tilerec.data.vocabulary import IdVocabulary
from tilerec.errors import ConfigError, FileError, InputError

Run = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]
"""Distinct hashes, ascending, and their counts."""

_KINDS = ("integer", "text", "boolean")
_BYTES_PER_ID = 16


@dataclass(frozen=True)
class VocabularySummary:
    """A vocabulary that was written.

    Attributes:
        table: its name.
        path: its file.
        distinct, kept: numbers of distinct ids in the data, and in the vocabulary.
        occurrences, covered: numbers of ids in the data, and of those that the vocabulary has.
    """

    table: str
    path: Path
    distinct: int
    kept: int
    occurrences: int
    covered: int


def vocabulary_file(folder: Path, table: str) -> Path:
    """Return the file with the vocabulary of a table."""
    return folder / f"{table}.parquet"


def write_vocabularies(
    source: RowGroups,
    tables: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    min_count: int = 1,
    max_rows: int = 0,
    memory_bytes: int = 1 << 28,
    report: Callable[[int, int], object] = lambda done, total: None,
) -> list[VocabularySummary]:
    """Count the ids of columns in one pass, and write a vocabulary per table.

    Args:
        source: the data.
        tables: by name of each table the columns whose ids share it.
        out: folder of the files `<table>.parquet`, created if it does not exist. Sorted runs are there meanwhile.
        min_count: least number of occurrences of an id that gets a row of its own.
        max_rows: rows of each table at most, row 0 included; 0 for no limit.
        memory_bytes: of the counts in memory; more are written to disk. A vocabulary itself takes 24 bytes per id.
        report: called with (rows read, rows in all) after each row group.

    Raises:
        ConfigError: no table, a column that does not exist, or a setting out of range.
        InputError: a column does not hold ids, or the data cannot be read.
        FileError: a file cannot be written.
    """
    if not tables:
        raise ConfigError("vocabulary: got no tables; expected at least one. Name the columns whose ids to count.")
    if min_count < 1 or max_rows < 0 or max_rows == 1:
        raise ConfigError(
            f"vocabulary: got min_count={min_count} and max_rows={max_rows}; expected at least 1, and 0 or at least 2. "
            "Correct them."
        )
    for columns in tables.values():
        for column in columns:
            _check_column(source, column)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".counts-", dir=folder) as scratch:
            counts = {name: _IdCounts(Path(scratch), n) for n, name in enumerate(tables)}
            _count(source, tables, counts, memory_bytes, report)
            types = {name: _type_of(source, columns) for name, columns in tables.items()}
            return [
                _write(name, own, folder, types[name], min_count, max_rows, memory_bytes)
                for name, own in counts.items()
            ]
    except OSError as error:
        raise FileError(
            f"vocabulary: got {error.strerror!r} for {folder}; expected a writable folder. Choose another one."
        ) from error


def _check_column(source: RowGroups, column: str) -> None:
    check_exists(source, column, "id column")
    kind = kind_of(source.schema.field(column).type).removeprefix("list of ")
    if kind not in _KINDS:
        raise InputError(
            f"{source.name}: id column {column!r}: got {source.schema.field(column).type}; expected integers, text, or "
            "lists of them. Convert the column."
        )


def _type_of(source: RowGroups, columns: Sequence[str]) -> str:
    """Return the type of the ids of a table, "integer" or "text"; "" for both."""
    found = {id_type(source.schema.field(column).type) for column in columns}
    return found.pop() if len(found) == 1 else ""


def _count(
    source: RowGroups,
    tables: Mapping[str, Sequence[str]],
    counts: Mapping[str, _IdCounts],
    memory_bytes: int,
    report: Callable[[int, int], object],
) -> None:
    done, total = 0, sum(source.group_rows)
    for group, rows in enumerate(source.group_rows):
        with source.open(group) as reader:
            for name, columns in tables.items():
                for column in columns:
                    counts[name].add(_hashes(reader.read([column])[column]))
        while sum(own.held for own in counts.values()) * _BYTES_PER_ID > memory_bytes:
            largest = max(counts.values(), key=lambda own: own.held)
            largest.compact()
            if largest.held * _BYTES_PER_ID * 2 > memory_bytes // len(counts):
                largest.spill()
        done += rows
        report(done, total)


def _hashes(column: object) -> npt.NDArray[np.uint64]:
    """Return the hashes of a column's ids, without missing ones."""
    found = read_values(column)
    values_N = found.values if found.missing is None else found.values[~found.missing]
    if found.hashed:
        hashed_N: npt.NDArray[np.uint64] = values_N
        return hashed_N
    return hash_values(values_N)


class _IdCounts:
    """Counts of one table's ids: sorted runs in memory and on disk."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        self._runs: list[Run] = []
        self._files: list[Path] = []
        self.held = 0  # ids in memory

    def add(self, hashes_N: npt.NDArray[np.uint64]) -> None:
        if len(hashes_N):
            self._runs.append(np.unique(hashes_N, return_counts=True))
            self.held += len(self._runs[-1][0])

    def compact(self) -> None:
        """Merge the runs in memory into one."""
        self._runs = [_merged(self._runs)]
        self.held = len(self._runs[0][0])

    def spill(self) -> None:
        """Write the runs in memory to disk, as one."""
        run = _merged(self._runs)
        path = self._folder / f"{self._number}-{len(self._files)}.npy"
        np.save(path, np.stack([run[0], run[1].view(np.uint64)]))
        self._files.append(path)
        self._runs, self.held = [], 0

    def ranges(self, memory_bytes: int) -> Iterator[Run]:
        """Yield the merged counts of ascending ranges of hashes, each in about `memory_bytes`."""
        files = [np.load(path, mmap_mode="r") for path in self._files]
        total = self.held + sum(one.shape[1] for one in files)
        parts = max(1, -(-total * _BYTES_PER_ID * 3 // memory_bytes))
        edges = [(1 << 64) * part // parts for part in range(1, parts)]
        cuts = [
            [0, *(int(np.searchsorted(hashes, np.uint64(edge))) for edge in edges), len(hashes)]
            for hashes in [*(run[0] for run in self._runs), *(one[0] for one in files)]
        ]
        runs = [*self._runs, *((one[0], one[1]) for one in files)]
        for part in range(parts):
            pieces = [
                (np.asarray(run[0][cut[part] : cut[part + 1]]), np.asarray(run[1][cut[part] : cut[part + 1]]))
                for run, cut in zip(runs, cuts, strict=True)
            ]
            yield _merged([(hashes, counts.view(np.int64)) for hashes, counts in pieces])


def _merged(runs: Sequence[Run]) -> Run:
    """Return one run with the counts of all runs."""
    if len(runs) == 1:
        return runs[0]
    if not sum(len(hashes) for hashes, _ in runs):
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    hashes_N = np.concatenate([hashes for hashes, _ in runs])
    counts_N = np.concatenate([counts for _, counts in runs])
    order_N = np.argsort(hashes_N, kind="stable")  # radix-like on runs that are sorted already
    hashes_N = hashes_N[order_N]
    starts_V = np.flatnonzero(np.concatenate([[True], hashes_N[1:] != hashes_N[:-1]]))
    return hashes_N[starts_V], np.add.reduceat(counts_N[order_N], starts_V)


def _write(
    name: str, counts: _IdCounts, folder: Path, type: str, min_count: int, max_rows: int, memory_bytes: int
) -> VocabularySummary:
    distinct = occurrences = 0
    kept: list[Run] = []
    for hashes_V, counts_V in counts.ranges(memory_bytes):
        distinct += len(hashes_V)
        occurrences += int(counts_V.sum())
        frequent_V = counts_V >= min_count
        kept.append((hashes_V[frequent_V], counts_V[frequent_V]))
    hashes_V, counts_V = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    vocabulary = IdVocabulary.ranked(hashes_V, counts_V, max(max_rows - 1, 0), type)
    path = vocabulary_file(folder, name)
    vocabulary.write(path)
    covered = int(vocabulary.counts.sum())
    return VocabularySummary(name, path, distinct, len(vocabulary.hashes), occurrences, covered)
