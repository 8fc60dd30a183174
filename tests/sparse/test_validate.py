"""What is wrong inside of a batch is named: feature, bag and value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.validate import validate_keyed_jagged_tensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig

T = torch.tensor
TABLES = [
    EmbeddingBagConfig(name="users", num_embeddings=10, embedding_dim=4, feature_names=["a"]),
    EmbeddingConfig(name="items", num_embeddings=20, embedding_dim=4, feature_names=["b", "a"]),
]


def _kjt(values: list[int], lengths: list[int] | None = None, offsets: list[int] | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"], T(values, dtype=torch.int64), None, lengths and T(lengths), offsets and T(offsets)
    )


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.booleans(), st.data())
def test_sound_batches_pass(lengths: list[int], by_offsets: bool, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 9), min_size=sum(lengths), max_size=sum(lengths)))
    offsets = [sum(lengths[:bag]) for bag in range(7)]
    kjt = KeyedJaggedTensor(
        ["a", "b", "no table"],
        T(ids, dtype=torch.int64),
        torch.rand(len(ids)),
        None if by_offsets else T(lengths),
        T(offsets) if by_offsets else None,
    )
    assert validate_keyed_jagged_tensor(kjt)
    assert validate_keyed_jagged_tensor(kjt, TABLES)


def test_batches_without_anything_pass() -> None:
    assert validate_keyed_jagged_tensor(KeyedJaggedTensor.empty(values_dtype=torch.int64), TABLES)
    assert validate_keyed_jagged_tensor(_kjt([], offsets=[0]), TABLES)
    assert validate_keyed_jagged_tensor(_kjt([], [0, 0, 0, 0]), TABLES)


def test_features_no_table_names_are_not_checked_for_range() -> None:
    kjt = KeyedJaggedTensor(["z", "a"], T([-5, 10**12, 9]), lengths=T([2, 1]))
    assert validate_keyed_jagged_tensor(kjt, TABLES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _kjt([1, 2, 3], [1, 1, -1, 2]), "Feature 'b', bag 0: got length -1; expected 0 or more"),
        (
            lambda: _kjt([1, 2, 3], offsets=[0, 1, 2, 1, 3]),
            "Feature 'b', bag 0: got offsets that descend from 2 to 1",
        ),
        (lambda: _kjt([1, 2, 3], offsets=[1, 1, 2, 2, 3]), "got 1 as the first offset; expected 0"),
        (
            lambda: _kjt([1, 2, 3], [1, 1, 1, 4]),
            "Feature 'b', bag 1: got the end 7; expected at most 3, the number of values",
        ),
        (
            lambda: _kjt([1, 2, 3], [1, 0, 1, 0]),
            "sum to 2; expected 3, the number of values.* is 3 at position 2",
        ),
        (
            lambda: _kjt([1, 2, 3], [1, 0, 1, 1], [0, 1, 2, 2, 3]),
            "Feature 'a', bag 1: got length 0 and offsets of 1 ids",
        ),
        (
            lambda: _with_weights(KeyedJaggedTensor(["a"], T([1, 2]), torch.rand(2), T([2])), torch.rand(3)),
            "got 3 weights; expected 2",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], torch.rand(2), lengths=T([2])),
            r"got values of torch\.float32",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], torch.ones(2, dtype=torch.bool), lengths=T([2])),
            r"got values of torch\.bool",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], torch.ones(2, dtype=torch.complex64), lengths=T([2])),
            r"got values of torch\.complex64; expected whole numbers as ids",
        ),
        (lambda: KeyedJaggedTensor(["a"], T([[1], [2]]), lengths=T([2])), r"got values of shape \[2, 1\]"),
        (
            lambda: KeyedJaggedTensor(["a"], torch.rand(2, 1), lengths=T([2])),
            r"got values of torch\.float32",
        ),
        (
            lambda: _variable(([0, 0], [0, 2])),
            "Feature 'b': got bag 2 for sample 1; expected one of its 2 bags",
        ),
        (lambda: _variable(([0, -1], [0, 1])), "Feature 'a': got bag -1 for sample 1"),
        (lambda: _variable(([0, 0],)), r"got inverse indices of shape \[1, 2\] for \['a', 'b'\]"),
        (
            lambda: _variable(([0, 0], [0, 1]), ["a", "x"]),
            r"got inverse indices without the keys \['b'\] and with the unknown keys \['x'\]",
        ),
        (lambda: _variable(([0, 0],), ["a"]), r"got inverse indices without the keys \['b'\]"),
        (lambda: _one_key([[0, 3]]), "Feature 'a': got bag 3 for sample 1; expected one of its 3 bags"),
        (lambda: _one_key([[-1, 0]]), "Feature 'a': got bag -1 for sample 0; expected one of its 3 bags"),
    ],
)
def test_the_first_fault_is_named(make: Callable[[], KeyedJaggedTensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate_keyed_jagged_tensor(make(), TABLES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _kjt([9, 10, 3], [1, 1, 1, 0]),
            r"Feature 'a', bag 1: got id 10 \(value 1\); expected one in \[0, 10\), the rows of table 'users'",
        ),
        (
            lambda: _kjt([9, 3, 20], [1, 0, 0, 2]),
            r"Feature 'b', bag 1: got id 20 \(value 2\); expected one in \[0, 20\), the rows of table 'items'",
        ),
        (
            lambda: _kjt([-1, 3, 2], [1, 0, 0, 2]),
            r"Feature 'a', bag 0: got id -1 \(value 0\); expected one in",
        ),
        (
            lambda: KeyedJaggedTensor(
                ["a", "b"], T([1, 2, 30]), lengths=T([1, 1, 1]), stride_per_key_per_rank=[[1], [2]]
            ),
            "Feature 'b', bag 1: got id 30",
        ),
    ],
)
def test_an_id_outside_of_its_table_gives_false_and_a_warning(
    make: Callable[[], KeyedJaggedTensor], message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        assert validate_keyed_jagged_tensor(make(), TABLES) is False


def _with_weights(kjt: KeyedJaggedTensor, weights: torch.Tensor) -> KeyedJaggedTensor:
    """A tensor put together from leaves, which nobody checks."""
    leaves, spec = pytree.tree_flatten(kjt)
    return pytree.tree_unflatten([leaves[0], weights, *leaves[2:]], spec)


def _one_key(inverse: list[list[int]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a"],
        T([1, 2]),
        lengths=T([1, 0, 1]),
        stride_per_key_per_rank=[[3]],
        inverse_indices=(["a"], T(inverse)),
    )


def _variable(inverse: tuple[list[int], ...], keys: list[str] | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(6),
        lengths=T([1, 2, 3]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(keys or ["a", "b"], T(inverse)),
    )


def test_variable_batches_with_sound_inverse_indices_pass() -> None:
    assert validate_keyed_jagged_tensor(_variable(([0, 0], [0, 1])), TABLES)
    # In another order than the keys.
    assert validate_keyed_jagged_tensor(_variable(([1, 0], [0, 0]), ["b", "a"]), TABLES)
