"""`IdVocabulary`: known ids with a row of their own each, and the Parquet file of them.

    hash    uint64, ascending    `hash_values` of the id
    row     int64                1 for the most frequent id, 2 for the next one, …
    count   int64                occurrences

Row 0 is for ids that the vocabulary lacks, and for missing ones. Ids are compared by their 64-bit hashes: among 100
million ids two share a hash with a probability of 0.03 %.

Legend: V known ids, N ids of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as parquet

from tilerec.atomic_file import open_replacement
from tilerec.errors import InputError
from tilerec.file_kind import VOCABULARY

_TYPE_KEY = b"ids"
"""Name of the type of the ids in the metadata of the file; files of earlier versions lack it."""
SCHEMA = pa.schema([("hash", pa.uint64()), ("row", pa.int64()), ("count", pa.int64())])


@dataclass(frozen=True, eq=False)
class IdVocabulary:
    """Known ids and their rows.

    Attributes:
        hashes: uint64 [V], ascending.
        rows: int64 [V], a permutation of 1 to V.
        counts: int64 [V], occurrences of each id.
        type: of the ids, "integer" or "text"; "" if it is unknown, or if there are both.
    """

    hashes: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    type: str = ""

    @staticmethod
    def ranked(
        hashes_V: npt.NDArray[np.uint64], counts_V: npt.NDArray[np.int64], most: int = 0, type: str = ""
    ) -> IdVocabulary:
        """Return the vocabulary of distinct ids, whose rows are in the order of their counts.

        Args:
            hashes_V: ascending. Ids with equal counts get rows in the order of their hashes.
            most: number of most frequent ids to keep; 0 keeps all.
            type: see the attribute.
        """
        by_count = np.argsort(-counts_V, kind="stable")[: most or None]
        rows_V = np.zeros(len(hashes_V), np.int64)
        rows_V[by_count] = np.arange(1, len(by_count) + 1)
        kept_V = rows_V > 0
        return IdVocabulary(hashes_V[kept_V], rows_V[kept_V], counts_V[kept_V], type)

    @property
    def num_rows(self) -> int:
        """Least number of rows of a table for this vocabulary: one per id, and row 0."""
        return len(self.hashes) + 1

    def rows_of(self, hashes_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the row of each id, int64 [N]; 0 for ids that the vocabulary lacks."""
        if not len(self.hashes):
            return np.zeros(len(hashes_N), np.int64)
        place_N = np.searchsorted(self.hashes, hashes_N)
        np.minimum(place_N, len(self.hashes) - 1, out=place_N)
        return np.where(self.hashes[place_N] == hashes_N, self.rows[place_N], 0)

    def write(self, path: str | Path) -> None:
        """Write the Parquet file; an earlier one is replaced. Raise `FileError` if it cannot be written."""
        columns = [pa.array(column) for column in (self.hashes, self.rows, self.counts)]
        table = pa.table(columns, SCHEMA.with_metadata({_TYPE_KEY: self.type.encode(), **VOCABULARY.metadata}))
        with open_replacement(path, "Vocabulary") as file:
            parquet.write_table(table, file)

    @staticmethod
    def read(path: str | Path) -> IdVocabulary:
        """Return the vocabulary of a file; raise `InputError` if it is none."""
        try:
            table = parquet.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            reason = str(error) if Path(path).exists() else "no such file"
            raise InputError(
                f"vocabulary {path}: got a file that cannot be read ({reason}); expected a file of `tilerec data "
                "vocabulary`. Write it again."
            ) from error
        if table.schema.names != SCHEMA.names or table.schema.types != SCHEMA.types:
            raise InputError(
                f"vocabulary {path}: got columns {table.schema.names}; expected {SCHEMA.names}, from `tilerec data "
                "vocabulary`. Write it again."
            )
        kind = (table.schema.metadata or {}).get(_TYPE_KEY, b"").decode()
        hashes, rows, counts = (column.to_numpy() for column in table.columns)
        found = IdVocabulary(hashes, rows, counts, kind)
        if (found.hashes[1:] <= found.hashes[:-1]).any() or not np.array_equal(
            np.sort(found.rows), np.arange(1, found.num_rows)
        ):
            raise InputError(
                f"vocabulary {path}: got unsorted hashes, or rows that are not 1 to {found.num_rows - 1:,}; expected a "
                "file of `tilerec data vocabulary`. Write it again."
            )
        return found
