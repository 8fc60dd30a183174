"""Mapping of categorical values to table rows.

Two ways: `hash_rows` works for any values, but different values may share a row. `Vocabulary` gives each known value
its own row.

The hash is part of the file format of a trained model, so it must never change. It is

    integers   mix(value)
    text       mix(FNV-1a-64 of the bytes)
    row        hash mod number of rows            (as unsigned 64-bit numbers)

with `mix` the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) and
FNV-1a as in the IETF draft draft-eastlake-fnv (offset basis 0xcbf29ce484222325, prime 0x100000001b3).
Worked example: mix(1) = 0x5692161d100b05e5, so integer 1 goes to row 0x5692161d100b05e5 mod 1000 = 789 of 1000.

Legend: N values, R rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tilerec.data.pooled_memory import empty, tensor_of
from tilerec.errors import ConfigError
from tilerec.ops.hash.definition import hash_rows as hash_ids

_FNV_BASIS = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_VALUES_PER_STEP = 48
"""Minimum number of values for a vectorised step: for fewer, Python steps are faster (5 us per vectorised step, 0.1 us
per value in Python, on a 2-core x86 machine). So the work is proportional to the bytes, whatever the longest value."""


def mix(values_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the splitmix64 finalizer: a bijection of 64-bit numbers; each output bit depends on all input bits."""
    x = values_N.astype(np.uint64, copy=True)
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x


def hash_values(values_N: npt.NDArray[np.int64] | pa.BinaryArray) -> npt.NDArray[np.uint64]:
    """Return 64-bit hashes of integers, or of the bytes of an Arrow binary array (see the top of this file)."""
    if isinstance(values_N, np.ndarray):
        return mix(values_N.astype(np.int64, copy=False).view(np.uint64))
    if not len(values_N):
        return np.zeros(0, np.uint64)
    _, offsets_buffer, bytes_buffer = values_N.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[values_N.offset : values_N.offset + len(values_N) + 1]
    starts_N = offsets[:-1].astype(np.int64)
    lengths_N = np.diff(offsets)
    data = np.frombuffer(b"" if bytes_buffer is None else bytes_buffer, np.uint8)
    hashes_N = np.full(len(values_N), _FNV_BASIS, np.uint64)
    # One vectorised step per byte position, while enough values have a byte there.
    longest_first_N = np.argsort(-lengths_N, kind="stable")
    ends_N = np.sort(lengths_N)
    position = 0
    for position in range(int(ends_N[-1])):
        active = len(ends_N) - int(np.searchsorted(ends_N, position, side="right"))
        if active < _VALUES_PER_STEP:
            break
        where = slice(None) if active == len(ends_N) else longest_first_N[:active]
        hashes_N[where] = (hashes_N[where] ^ data[starts_N[where] + position]) * _FNV_PRIME
    else:
        return mix(hashes_N)
    for n in longest_first_N[:active].tolist():
        rest = data[starts_N[n] + position : starts_N[n] + lengths_N[n]].tobytes()
        hashes_N[n] = _fnv(rest, int(hashes_N[n]))
    return mix(hashes_N)


def _fnv(data: bytes, state: int) -> int:
    """Return FNV-1a-64 of bytes, continued from `state`, the hash of the preceding bytes."""
    for byte in data:
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return state


def rows_of_hashes(hashes_N: npt.NDArray[np.uint64], num_rows: int, first_row: int = 0) -> npt.NDArray[np.int64]:
    """Return first_row + hash mod (num_rows - first_row), the rows of `hash_rows`."""
    rows = np.uint64(num_rows - first_row)
    # h mod R = h - R floor(h / R): NumPy divides by one number in vectors, but takes its remainder one by one.
    multiple_N = hashes_N // rows
    multiple_N *= rows
    np.subtract(hashes_N, multiple_N, out=multiple_N)
    multiple_N += np.uint64(first_row)
    return multiple_N.view(np.int64)


def hash_rows(
    values_N: npt.NDArray[np.int64] | pa.BinaryArray, num_rows: int, *, first_row: int = 0
) -> npt.NDArray[np.int64]:
    """Return a row in [first_row, num_rows) for each value, by hash.

    Args:
        values_N: int64 array or Arrow binary array.
        num_rows: R, the number of rows of the table.
        first_row: rows before it are reserved, for example for missing values.
    """
    if num_rows <= first_row:
        raise ConfigError(
            f"hash_rows: got num_rows={num_rows} with first_row={first_row}; expected more rows than that. Use a "
            "larger table."
        )
    if not isinstance(values_N, np.ndarray):
        return rows_of_hashes(hash_values(values_N), num_rows, first_row)
    rows_N = empty(len(values_N), np.int64)
    hash_ids(tensor_of(values_N.astype(np.int64, copy=False)), num_rows, first_row, tensor_of(rows_N))
    return rows_N


class Vocabulary:
    """Known integer values, each with its own row; row 0 stands for every other value.

    Value k of the sorted distinct values has row k + 1. `Vocabulary([50, 7, 50]).rows([7, 50, 9]) == [1, 2, 0]`.
    """

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        self._sorted = np.unique(np.asarray(values, np.int64))

    @property
    def num_rows(self) -> int:
        """Number of rows of a table for this vocabulary: one per value, and row 0."""
        return len(self._sorted) + 1

    def rows(self, values_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row of each value; 0 for values that are not in the vocabulary."""
        if not len(self._sorted):
            return np.zeros(len(values_N), np.int64)
        place_N = np.searchsorted(self._sorted, values_N)
        found_N = self._sorted[np.minimum(place_N, len(self._sorted) - 1)] == values_N
        return np.where(found_N, place_N + 1, 0)
