"""Values to rows: the hash is fixed for ever, a vocabulary is exact."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.data.rows import Vocabulary, hash_rows, hash_values, mix
from tilerec.errors import ConfigError

MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _fnv(text: bytes) -> int:
    h = 0xCBF29CE484222325
    for byte in text:
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


@given(st.lists(st.binary(max_size=20), max_size=10), st.integers(0, 5))
def test_text_hash_equals_the_published_algorithm_byte_by_byte(texts: list[bytes], skipped: int) -> None:
    array = pa.array(texts, pa.binary())[skipped:]  # a slice: its buffers begin before it
    assert hash_values(array).tolist() == [_mix(_fnv(text)) for text in texts[skipped:]]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10))
def test_integer_hash_equals_the_published_algorithm(values: list[int]) -> None:
    assert hash_values(np.array(values, np.int64)).tolist() == [_mix(value & MASK) for value in values]


def test_hashes_are_those_of_every_earlier_version() -> None:
    """Trained tables depend on these numbers: a change here breaks every saved model."""
    assert _fnv(b"foobar") == 0x85944171F73967E8  # test vector of the FNV draft
    assert hash_rows(pa.array([b"abc", b"", b"68fd1e64"], pa.binary()), 1000).tolist() == [808, 203, 657]
    assert hash_rows(np.array([1, 2, -1]), 1000).tolist() == [789, 730, 67]
    assert int(mix(np.array([1], np.uint64))[0]) == 0x5692161D100B05E5


@pytest.mark.parametrize("first_row", [0, 1, 3])
def test_rows_lie_in_the_table_and_leave_the_first_ones_free(first_row: int) -> None:
    rows = hash_rows(np.arange(10_000), 7, first_row=first_row)
    assert set(rows.tolist()) == set(range(first_row, 7))


def test_narrow_strided_and_read_only_ids_have_the_rows_of_their_values() -> None:
    wide = np.arange(-40, 40)
    expected = hash_rows(wide, 1000, first_row=1).tolist()
    fixed = wide.copy()
    fixed.setflags(write=False)
    assert expected == [1 + _mix(value & MASK) % 999 for value in wide.tolist()]
    assert hash_rows(fixed, 1000, first_row=1).tolist() == expected
    assert hash_rows(wide.astype(np.int8), 1000, first_row=1).tolist() == expected
    assert hash_rows(np.repeat(wide, 2)[::2], 1000, first_row=1).tolist() == expected


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use a larger table"):
        hash_rows(np.arange(3), 1, first_row=1)


def test_vocabulary_gives_known_values_a_row_of_their_own_and_others_row_0() -> None:
    words = Vocabulary(np.array([50, 7, 50, -3]))
    assert words.num_rows == 4
    assert words.rows(np.array([7, 50, -3, 9, 51, -4])).tolist() == [2, 3, 1, 0, 0, 0]


def test_empty_vocabulary_has_one_row() -> None:
    words = Vocabulary(np.zeros(0, np.int64))
    assert words.num_rows == 1
    assert words.rows(np.array([4, 5])).tolist() == [0, 0]


def test_a_long_text_has_the_hash_of_its_bytes_in_steps_for_its_own_bytes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One field of 40,000 bytes among 1,000 of 8: no step over all values for each of its bytes."""
    texts = [b"%08d" % n for n in range(1000)]
    texts[500] = bytes(n * n % 251 for n in range(40_000))
    steps = 0
    searchsorted = np.searchsorted

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal steps
        steps += 1
        return searchsorted(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(np, "searchsorted", counted)
    found = hash_values(pa.array(texts, pa.binary()))
    assert steps < 20
    assert found.tolist() == [_mix(_fnv(text)) for text in texts]
