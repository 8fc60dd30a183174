"""The Criteo display-advertising (Kaggle) format: 13 counts, 26 hashed categories, click or no click.

Two layouts are recognised by their first line; either may be gzipped:
    CSV   header `Id,Label,I1,…,I13,C1,…,C26` (in any order, with any further columns)
    TSV   no header: label, I1 … I13, C1 … C26, separated by tabs

    label      1 for a click
    dense      I1 … I13 as sign(x) log(1 + |x|), which for counts is log(1 + x); a missing count is 0
    sparse     C1 … C26, one id each: row `hash_rows(text)` in [1, num_rows); a missing category has row 0
    held out   every `held_out_every`-th well-formed row

Legend: n rows of a block, B samples.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tilerec.data.batch import Batch
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.dataset import Dataset, SparseFeature
from tilerec.data.delimited import Block, Column, ColumnKind, DelimitedFile, OnBadRow, RowCount
from tilerec.data.read_ahead import arrays_ahead
from tilerec.data.rows import hash_rows
from tilerec.data.shuffle import Rows, batched, check_seed
from tilerec.data.transform import signed_log
from tilerec.data.vocabulary import IdVocabulary
from tilerec.errors import ConfigError, InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

DENSE = tuple(f"I{index}" for index in range(1, 14))
SPARSE = tuple(f"C{index}" for index in range(1, 27))
Missing = Literal["row", "empty"]

MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Rows of each category's bags in MLPerf's DLRM-DCNv2, whose data have one value per category."""

_COLUMNS = (
    Column("Label", ColumnKind.INTEGER, low=0, high=1),
    *(Column(name, ColumnKind.INTEGER, optional=True) for name in DENSE),
    *(Column(name, ColumnKind.TEXT) for name in SPARSE),
)


class Criteo(Dataset):
    """Clicks on display advertisements, streamed from the file on every pass.

    Args:
        path: the file.
        num_rows: rows of each category's table; one number for all, or 26.
        missing: "row" gives a missing category row 0 of its table, so its vector is learned; "empty" gives it no id,
            so its pooled vector is zero and values hash to [0, num_rows).
        held_out_every: k; the last of every k well-formed rows is held out.
        on_bad_row: "error", or "skip" to leave malformed lines out and count them.
        seed: seed of the order of the training part, which differs from epoch to epoch.
        shuffle_window: number of rows shuffled together; see `batched`.
        block_bytes: bytes of text read at a time.

    Raises:
        InputError: the file does not exist, has no rows, or has a malformed line.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_rows: int | Sequence[int] = 100_000,
        missing: Missing = "row",
        held_out_every: int = 10,
        on_bad_row: OnBadRow = "error",
        seed: int = 0,
        shuffle_window: int = 1 << 17,
        block_bytes: int = 1 << 22,
    ) -> None:
        sizes = (num_rows,) * len(SPARSE) if isinstance(num_rows, int) else tuple(num_rows)
        if len(sizes) != len(SPARSE):
            raise ConfigError(
                f"num_rows: got {len(sizes)} numbers; expected one, or one for each of {len(SPARSE)} columns. Pass one."
            )
        if missing not in ("row", "empty"):
            raise ConfigError(f"missing: got {missing!r}; expected 'row' or 'empty'. Leave it out for 'row'.")
        self._first_row = 1 if missing == "row" else 0
        for name, size in zip(SPARSE, sizes, strict=True):
            if size <= self._first_row:
                raise ConfigError(
                    f"num_rows of {name!r}: got {size}; expected above {self._first_row}. Use a larger table."
                )
        if held_out_every < 2:
            raise ConfigError(
                f"held_out_every: got {held_out_every}; expected 2 or more, so training has rows. Change it."
            )
        self._features = tuple(SparseFeature(name, size) for name, size in zip(SPARSE, sizes, strict=True))
        self._held_out_every = held_out_every
        check_seed(seed)
        self._seed = seed
        self._window = shuffle_window
        self._count = RowCount()
        header = _has_header(Path(path))
        self._file = DelimitedFile(
            path,
            _COLUMNS,
            delimiter="," if header else "\t",
            header=header,
            on_bad_row=on_bad_row,
            block_bytes=block_bytes,
        )

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        return self._features

    @property
    def dense_features(self) -> tuple[str, ...]:
        return DENSE

    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        order = np.random.default_rng([self._seed, epoch])
        chunks = self._rows(held_out=False)
        yield from _assembled(batched(chunks, batch_size, window=self._window, generator=order))

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        yield from _assembled(batched(self._rows(held_out=True), batch_size))

    def row_count(self) -> RowCount:
        return self._count

    def _rows(self, *, held_out: bool) -> Iterator[Rows]:
        count = RowCount()
        row = 0
        for block in self._file.blocks(count):
            number_n = np.arange(row, row + len(block))
            row += len(block)
            is_held_out_n = number_n % self._held_out_every == self._held_out_every - 1
            chosen_n = np.flatnonzero(is_held_out_n == held_out)
            if len(chosen_n):
                yield tuple(part[chosen_n] for part in self._columns(block))
        if not count.rows:
            raise InputError(f"{self._file.path}: got no rows; expected lines in the Criteo format. Check the path.")
        self._count = count

    def _columns(self, block: Block) -> Rows:
        dense = np.stack([block.numbers[name] for name in DENSE], axis=1)
        rows = np.empty((len(block), len(SPARSE)), np.int64)
        for index, feature in enumerate(self._features):
            texts = block.texts[feature.name]
            rows[:, index] = hash_rows(texts, feature.num_rows, first_row=self._first_row)
            absent_n = np.diff(np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]) == 0
            rows[absent_n, index] = 0 if self._first_row else -1  # -1: no id
        return signed_log(dense), rows, block.numbers["Label"].astype(np.float32)


def criteo_columns(
    num_rows: int = 100_000, *, missing: Missing = "row", vocabularies: str | Path = "", multi_hot: Sequence[int] = ()
) -> Columns:
    """Return the roles of the columns of Criteo files as Parquet or text, with the rows of `Criteo`.

    For the Terabyte data, convert the day files (`tilerec.data.convert.convert(days, out, delimiter="\\t",
    names=("Label", *DENSE, *SPARSE), texts=SPARSE)`), and hold a day out.

    Args:
        num_rows, missing: see `Criteo`.
        vocabularies: folder with a vocabulary of each category, C1.parquet to C26.parquet, from `tilerec data
            vocabulary`; then tables have a row for each frequent id, in place of `num_rows`. "": ids are hashed.
        multi_hot: rows of each category's bags, 26 numbers such as `MULTI_HOT`; (): one each.
    """
    if len(multi_hot) not in (0, len(SPARSE)):
        raise ConfigError(f"multi_hot: got {len(multi_hot)} numbers; expected {len(SPARSE)}. Pass MULTI_HOT.")
    files = {name: str(Path(vocabularies) / f"{name}.parquet") for name in SPARSE} if vocabularies else {}
    sizes = {name: IdVocabulary.read(file).num_rows for name, file in files.items()}
    return Columns(
        labels=(LabelColumn("Label", task="click"),),
        dense=tuple(DenseColumn(name, transform="log", missing="zero") for name in DENSE),
        ids=tuple(
            IdColumn(name, missing=missing, multi_hot=count)
            for name, count in zip(SPARSE, multi_hot or (1,) * len(SPARSE), strict=True)
        ),
        tables=tuple(
            TableRows(name, sizes[name], ids="vocabulary", vocabulary=files[name])
            if files
            else TableRows(name, num_rows)
            for name in SPARSE
        ),
    )


def _has_header(path: Path) -> bool:
    """Return True if the first line holds column names; a headerless file begins with a label and a tab."""
    try:
        with path.open("rb") as stream:
            zipped = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as stream:
            start = stream.read(1 << 10)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: got compressed data that is damaged from its start ({error}); expected gzip. Download the file "
            "again."
        ) from error
    except OSError as error:
        raise InputError(
            f"{path}: got {error.strerror!r} on opening it; expected a readable file. Check the path."
        ) from error
    first_line = start.split(b"\n", 1)[0]
    return b"\t" not in first_line and any(byte >= 65 for byte in first_line[:16])


def _assembled(rows: Iterator[Rows]) -> Iterator[Batch]:
    """Yield batches of rows, read ahead by a thread."""
    with arrays_ahead(_feature_major(each) for each in rows) as ahead:
        yield from map(_batch, ahead)


def _feature_major(rows: Rows) -> Rows:
    """Return the arrays of a batch: dense features [B, I], ids [N], their numbers [F B], labels [B]."""
    dense_BI, rows_BF, label_B = rows
    rows_FB = np.ascontiguousarray(rows_BF.T)
    present_FB = rows_FB >= 0
    return np.array(dense_BI), rows_FB[present_FB], present_FB.reshape(-1).astype(np.int32), np.array(label_B)


def _batch(arrays: Rows) -> Batch:
    dense_BI, ids_N, lengths_FB, label_B = map(torch.from_numpy, arrays)
    return Batch(
        dense_features=dense_BI,
        sparse_features=KeyedJaggedTensor.from_lengths_sync(keys=list(SPARSE), values=ids_N, lengths=lengths_FB),
        labels=label_B,
    )
