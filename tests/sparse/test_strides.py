"""Bags per key and rank of a variable batch."""

from __future__ import annotations

import pytest
import torch

from tilerec.errors import InputError
from tilerec.sparse.strides import Strides


@pytest.mark.parametrize("counts", [[[1, 2], [0, 4], [3, 0]], torch.tensor([[1, 2], [0, 4], [3, 0]])])
def test_counts_sum_over_ranks(counts: object) -> None:
    strides = Strides.checked(3, counts)  # type: ignore[arg-type]
    assert strides.counts() == ((1, 2), (0, 4), (3, 0))
    assert strides.per_key() == [3, 4, 3]
    assert strides.bag_offsets() == [0, 3, 7, 10]
    assert strides.select([2, 0]).counts() == ((3, 0), (1, 2))


def test_a_tensor_and_numbers_are_the_same_strides() -> None:
    strides = Strides.checked(2, [[1, 2], [0, 4]])
    assert strides.tensor().dtype == torch.int64
    assert Strides(None, strides.tensor()) == strides
    assert Strides(None, strides.tensor()).counts() == strides.counts()
    assert strides != Strides.checked(2, [[1, 2], [4, 0]])
    assert Strides(()).tensor().shape == (0, 0)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1]], "got 1 rows; expected 2"),
        ([[1], [1, 2]], "got rows of different lengths"),
        ([[1], [-1]], "negative batch size"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Strides.checked(2, counts)
