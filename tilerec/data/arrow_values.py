"""Arrow columns as NumPy arrays: values, lengths of lists, and which values are missing.

Chunked arrays, slices, dictionaries, views, fixed-size and large lists all give the same plain arrays. Chunks are
converted one by one and joined with 64-bit offsets, so the 32-bit offsets of Arrow's lists and texts cannot overflow.
Of texts only the 64-bit hashes are kept (`hash_values`), since texts are ids. A dictionary's texts are hashed once.

Legend: n rows, N values (n of a column without lists).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as arrow

from tilerec.data.rows import hash_values

Kind = str
"""Class of a column's values: "integer", "number", "boolean", "text", "list of integer", ... or Arrow's own name."""
Offsets = npt.NDArray[np.int32] | npt.NDArray[np.int64]


_NUMBERS = frozenset(
    kind.id
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float32(), pa.float64()),
    )
)
"""Types whose values NumPy reads as they are."""


@dataclass(frozen=True)
class Values:
    """Values of a column or of the lists in it.

    Attributes:
        values: numbers [N], which may be read-only; of texts, their hashes as uint64.
        offsets: start of each row's values, and the end of the last, int32 or int64 [n + 1], from 0 to N; they may be
            read-only. None if each row has exactly one value.
        missing: bool [N], True for nulls, whose value is arbitrary; None if there are none.
        missing_lists: bool [n], True for rows whose list is null (it has no values); None if there are none.
        hashed: values are hashes of texts.
    """

    values: npt.NDArray[Any]
    offsets: Offsets | None = None
    missing: npt.NDArray[np.bool_] | None = None
    missing_lists: npt.NDArray[np.bool_] | None = None
    hashed: bool = False


def kind_of(kind: pa.DataType) -> Kind:
    """Return the class of a column's type. Types of one class are read alike; other classes do not mix."""
    if pa.types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if is_list(kind):
        return f"list of {kind_of(kind.value_type)}"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    return "text" if _is_text(kind) else str(kind)


def is_list(kind: pa.DataType) -> bool:
    """Return True for every type of list."""
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def read_values(column: pa.ChunkedArray | pa.Array) -> Values:
    """Return the values of a column of numbers, texts, or lists of them (see `kind_of`)."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if len(chunks) == 1:
        return _of_chunk(chunks[0])
    if not chunks:
        return _of_chunk(pa.array([], column.type))
    return join_values([_of_chunk(chunk) for chunk in chunks])


def join_values(parts: list[Values]) -> Values:
    """Return the values of consecutive rows as one."""
    if len(parts) == 1:
        return parts[0]
    counts = [len(part.values) for part in parts]
    lists = [part.offsets for part in parts if part.offsets is not None]
    return Values(
        np.concatenate([part.values for part in parts]),
        join_offsets(lists) if lists else None,
        _joined_masks([part.missing for part in parts], counts),
        _joined_masks([part.missing_lists for part in parts], [len(one) - 1 for one in lists]) if lists else None,
        parts[0].hashed,
    )


def join_offsets(parts: Sequence[Offsets]) -> npt.NDArray[np.int64]:
    """Return the offsets of consecutive rows, whose values are concatenated. [0, 2], [0, 1, 1] -> [0, 2, 3, 3]."""
    joined = np.concatenate([np.zeros(1, np.int64), *(part[1:] for part in parts)], dtype=np.int64)
    at, before = 1, 0
    for part in parts:
        joined[at : at + len(part) - 1] += before
        at, before = at + len(part) - 1, before + int(part[-1])
    return joined


def as_int64(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return numbers as integers that are equal where the numbers are: of fractions, their bits as float64."""
    if numbers.dtype.kind == "f":
        return numbers.astype(np.float64).view(np.int64)
    return numbers.astype(np.int64, copy=False)


def _joined_masks(masks: list[npt.NDArray[np.bool_] | None], counts: list[int]) -> npt.NDArray[np.bool_] | None:
    if all(mask is None for mask in masks):
        return None
    return np.concatenate(
        [np.zeros(count, np.bool_) if mask is None else mask for mask, count in zip(masks, counts, strict=True)]
    )


def _of_chunk(chunk: pa.Array) -> Values:
    if chunk.type.id in _NUMBERS and not chunk.null_count:  # most columns: the tests below take 60 us after a decode
        return Values(chunk.to_numpy())
    if not is_list(chunk.type):
        return _of_dictionary(chunk) if pa.types.is_dictionary(chunk.type) else _of_flat(chunk)
    types = pa.types
    if len(chunk) and not chunk.null_count and (types.is_list(chunk.type) or types.is_large_list(chunk.type)):
        # `values` ignores slices, the offsets do not.
        offsets_n1: Offsets = chunk.offsets.to_numpy()
        first, last = int(offsets_n1[0]), int(offsets_n1[-1])
        inner = _of_chunk(chunk.values.slice(first, last - first))
        return Values(inner.values, offsets_n1 - first if first else offsets_n1, inner.missing, None, inner.hashed)
    # `flatten` honours slices and leaves out the contents of null lists; `values` does neither.
    inner = _of_chunk(chunk.flatten())
    lengths = arrow.list_value_length(chunk)
    absent = None
    if lengths.null_count:
        absent = np.asarray(lengths.is_null())
        lengths = lengths.fill_null(0)
    offsets_n1 = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets_n1[1:])
    return Values(inner.values, offsets_n1, inner.missing, absent, inner.hashed)


def _of_dictionary(chunk: pa.DictionaryArray) -> Values:
    words = _of_flat(chunk.dictionary)
    if not len(words.values):
        return Values(np.zeros(len(chunk), words.values.dtype), missing=_nulls(chunk), hashed=words.hashed)
    index_n = chunk.indices.fill_null(0).to_numpy(zero_copy_only=False)
    missing = _nulls(chunk)
    if words.missing is not None:
        missing = words.missing[index_n] | (False if missing is None else missing)
    return Values(words.values[index_n], missing=missing, hashed=words.hashed)


def _of_flat(chunk: pa.Array) -> Values:
    if pa.types.is_null(chunk.type):
        chunk = chunk.cast(pa.int64())
    missing = _nulls(chunk)
    if _is_text(chunk.type):
        texts = chunk if pa.types.is_binary(chunk.type) else chunk.cast(pa.binary())
        return Values(hash_values(texts), missing=missing, hashed=True)
    if pa.types.is_boolean(chunk.type):
        chunk = chunk.cast(pa.int8())
    elif pa.types.is_decimal(chunk.type):
        chunk = chunk.cast(pa.float64())
    if missing is not None:
        chunk = chunk.fill_null(0)
    return Values(chunk.to_numpy(zero_copy_only=False), missing=missing)


def _nulls(chunk: pa.Array) -> npt.NDArray[np.bool_] | None:
    return np.asarray(chunk.is_null()) if chunk.null_count else None


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )
