"""`JaggedTensor`: bags of different lengths."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilerec.errors import InputError
from tilerec.sparse.jagged_tensor import JaggedTensor, jt_is_equal

LENGTHS = st.lists(st.integers(0, 4), max_size=7)
ITEMS = st.sampled_from([(), (1,), (3,)])


def _make(lengths: list[int], item: tuple[int, ...] = (), weighted: bool = True) -> JaggedTensor:
    total = sum(lengths)
    return JaggedTensor(
        torch.rand(total, *item),
        torch.rand(total) if weighted else None,
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )


def _example() -> JaggedTensor:
    return JaggedTensor(
        torch.tensor([10, 11, 12]),
        torch.tensor([0.5, 1.0, 2.0]),
        lengths=torch.tensor([2, 0, 1], dtype=torch.int32),
    )


@given(LENGTHS, ITEMS)
def test_from_dense_and_to_dense_are_inverse(lengths: list[int], item: tuple[int, ...]) -> None:
    jagged = _make(lengths, item)
    values, weights = jagged.to_dense(), jagged.to_dense_weights()
    assert weights is not None
    assert [len(bag) for bag in values] == lengths
    if lengths:
        again = JaggedTensor.from_dense(values, weights)
        assert again.lengths().dtype == torch.int32
        assert jt_is_equal(again, jagged)


@given(LENGTHS, ITEMS, st.integers(0, 3))
def test_padding_and_back_are_inverse(lengths: list[int], item: tuple[int, ...], spare: int) -> None:
    jagged = _make(lengths, item)
    width = max(lengths, default=0) + spare
    padded, weights = jagged.to_padded_dense(width, -1.0), jagged.to_padded_dense_weights(width)
    assert padded.shape == (len(lengths), width, *item)
    assert weights is not None
    again = JaggedTensor.from_dense_lengths(padded, jagged.lengths(), weights)
    assert jt_is_equal(again, jagged)


def test_padding_defaults_to_the_longest_bag() -> None:
    assert _example().to_padded_dense().tolist() == [[10, 11], [0, 0], [12, 0]]
    assert _example().to_padded_dense(1, 7).tolist() == [[10], [7], [12]]
    assert JaggedTensor.empty().to_padded_dense().shape == (0, 0)
    assert _make([1], weighted=False).to_padded_dense_weights() is None
    assert _make([1], weighted=False).to_dense_weights() is None


def test_gradients_flow_through_padding() -> None:
    values = torch.rand(3, requires_grad=True)
    JaggedTensor(values, lengths=torch.tensor([2, 0, 1])).to_padded_dense(1).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 0, 1]


def test_offsets_give_the_same_tensor_as_lengths() -> None:
    by_offsets = JaggedTensor(_example().values(), _example().weights(), offsets=torch.tensor([0, 2, 2, 3]))
    assert jt_is_equal(by_offsets, _example())
    assert by_offsets.lengths_or_none() is not None  # derived by the comparison
    assert _example().offsets_or_none() is None
    assert _example().offsets().tolist() == [0, 2, 2, 3]


def test_equality_sees_every_part() -> None:
    base = _example()
    values, weights, lengths = base.values(), base.weights(), base.lengths()
    assert jt_is_equal(base, _example())
    assert not jt_is_equal(base, JaggedTensor(values + 1, weights, lengths))
    assert not jt_is_equal(base, JaggedTensor(values.int(), weights, lengths))
    assert not jt_is_equal(base, JaggedTensor(values, weights + 1, lengths))
    assert not jt_is_equal(base, JaggedTensor(values, None, lengths))
    assert not jt_is_equal(base, JaggedTensor(values, weights, torch.tensor([2, 1, 0])))
    assert not jt_is_equal(base, JaggedTensor(values, weights, torch.tensor([3])))


def test_empty_has_no_bags_and_the_types_asked_for() -> None:
    empty = JaggedTensor.empty(True, None, torch.int64, torch.float16, torch.int64)
    assert (empty.values().dtype, empty.weights().dtype) == (torch.int64, torch.float16)
    assert empty.lengths().dtype == torch.int64
    assert empty.offsets().tolist() == [0]
    assert empty.to_dense() == []
    like = JaggedTensor.empty_like(_example())
    assert (like.values().dtype, like.weights().dtype, like.lengths().dtype) == (
        torch.int64,
        torch.float32,
        torch.int32,
    )
    assert like.lengths().shape == (0,)
    by_offsets = JaggedTensor(torch.arange(3), offsets=torch.tensor([0, 3], dtype=torch.int32))
    assert JaggedTensor.empty_like(by_offsets).lengths().dtype == torch.int32


def test_an_empty_tensor_on_a_device_takes_a_copy() -> None:
    there = JaggedTensor.empty_like(_example(), torch.device("cpu"))
    assert there.values().data_ptr() != _example().values().data_ptr()
    assert jt_is_equal(there.copy_(_example()), _example())


def test_lengths_of_no_bags_may_be_of_any_type() -> None:
    assert JaggedTensor(torch.tensor([]), lengths=torch.tensor([])).lengths().dtype == torch.int64


def test_weights_may_be_as_wide_as_values() -> None:
    values, weights = torch.rand(2, 3, 2), torch.rand(2, 3, 2)
    jagged = JaggedTensor.from_dense_lengths(values, torch.tensor([1, 3]), weights)
    dense = jagged.to_dense_weights()
    assert dense is not None
    assert torch.equal(dense[1], weights[1])
    padded = jagged.to_padded_dense_weights(3)
    assert padded is not None
    assert torch.equal(padded[0, 0], weights[0, 0])


def test_copy_overwrites_the_memory_and_what_followed_from_it() -> None:
    target = _example()
    assert target.offsets().tolist() == [0, 2, 2, 3]
    pointer = target.values().data_ptr()
    source = JaggedTensor(torch.tensor([1, 2, 3]), torch.ones(3), offsets=torch.tensor([0, 1, 2, 3]))
    assert target.copy_(source) is target
    assert target.values().data_ptr() == pointer
    assert target.offsets().tolist() == [0, 1, 2, 3]
    assert jt_is_equal(target, JaggedTensor(source.values(), source.weights(), target.lengths()))
    for other in (_make([3, 0, 0], (2,)), _make([2, 0, 1], weighted=False), _make([2, 1])):
        with pytest.raises(
            InputError, match=r"copy_: got a source .*; expected values \[3\], weights \[3\] and 3 bags"
        ):
            target.copy_(other)


def test_moving_keeps_the_bags() -> None:
    moved = _example().to(torch.device("meta"))
    assert moved.device() == moved.lengths().device == moved.weights().device == torch.device("meta")
    assert jt_is_equal(_example().to(torch.device("cpu"), non_blocking=True), _example())


def test_size_counts_what_is_held() -> None:
    jagged = _example()
    assert jagged.size_in_bytes() == 3 * 8 + 3 * 4 + 3 * 4
    jagged.offsets()
    assert jagged.size_in_bytes() == 3 * 8 + 3 * 4 + 3 * 4 + 4 * 8


def test_record_stream_leaves_host_tensors_alone() -> None:
    _example().record_stream(torch.Stream(device="cpu"))


def test_pinning_pins_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    assert jt_is_equal(_example().pin_memory(), _example())
    assert {tensor.dtype for tensor in pinned} == {torch.int64, torch.float32, torch.int32}


def test_text_shows_bags() -> None:
    assert str(_make([], weighted=False)) == "JaggedTensor({\n    []\n})\n"
    assert str(JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([0, 2]))) == (
        "JaggedTensor({\n    [[], [1, 2]]\n})\n"
    )
    assert str(_example()) == (
        'JaggedTensor({\n    "values": [[10, 11], [], [12]],\n    "weights": [[0.5, 1.0], [], [2.0]]\n})\n'
    )
    assert repr(_example()) == str(_example())


@pytest.mark.parametrize("derive", [False, True])
def test_pytree_holds_what_was_given_and_nothing_derived(derive: bool) -> None:
    for jagged, count in ((_example(), 3), (JaggedTensor(torch.arange(3), offsets=torch.tensor([0, 3])), 2)):
        if derive:
            jagged.offsets()
            jagged.lengths()
        leaves, spec = pytree.tree_flatten(jagged)
        assert len(leaves) == count
        again = pytree.tree_unflatten(leaves, spec)
        assert jt_is_equal(again, jagged)
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(_example())[0]]
    assert paths == [".values", ".weights", ".lengths"]


def test_copies_and_pickles_are_equal_and_apart() -> None:
    base = _example()
    for other in (copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        assert jt_is_equal(other, base)
        assert other.values().data_ptr() != base.values().data_ptr()
    file = io.BytesIO()
    torch.save(base, file)
    file.seek(0)
    assert jt_is_equal(torch.load(file, weights_only=True), base)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="neither lengths nor offsets"):
        JaggedTensor(torch.arange(3))
    with pytest.raises(InputError, match=r"got no weights; expected a weighted tensor\. Make it with weights="):
        _make([1], weighted=False).weights()
    with pytest.raises(InputError, match="got an empty list"):
        JaggedTensor.from_dense([])
    with pytest.raises(InputError, match="got weights with another number of bags or items than the values"):
        JaggedTensor.from_dense([torch.ones(2)], [torch.ones(1)])
    with pytest.raises(InputError, match=r"got values of shape \[2, 3\] with 3 lengths"):
        JaggedTensor.from_dense_lengths(torch.ones(2, 3), torch.tensor([1, 1, 1]))
    with pytest.raises(InputError, match="got a length of 4; expected at most the 3 items of a row"):
        JaggedTensor.from_dense_lengths(torch.ones(2, 3), torch.tensor([1, 4]))


def test_bags_may_be_part_of_a_larger_run_of_values() -> None:
    """As its offsets say, wherever they begin and end; lengths begin at the first value."""
    values, weights = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0.5, 1, 2, 4, 8])
    middle = JaggedTensor(values, weights, offsets=torch.tensor([2, 3, 3, 4]))
    assert [bag.tolist() for bag in middle.to_dense()] == [[3], [], [4]]
    assert [bag.tolist() for bag in middle.to_dense_weights() or []] == [[2], [], [4]]
    assert middle.to_padded_dense(2).tolist() == [[3, 0], [0, 0], [4, 0]]
    assert middle.lengths().tolist() == [1, 0, 1]
    assert middle.values() is values
    assert "[[3], [], [4]]" in str(middle)
    head = JaggedTensor(values, lengths=torch.tensor([1, 2]))
    assert [bag.tolist() for bag in head.to_dense()] == [[1], [2, 3]]
    assert JaggedTensor(values, offsets=torch.tensor([3])).to_dense() == []


@pytest.mark.parametrize(
    ("lengths", "offsets"),
    [([1, 5], None), ([3, -1, 1], None), (None, [0, 4, 6]), (None, [-1, 2]), (None, [0, 3, 2])],
)
def test_bags_outside_the_values_are_refused(lengths: list[int] | None, offsets: list[int] | None) -> None:
    jt = JaggedTensor(
        torch.arange(5),
        lengths=None if lengths is None else torch.tensor(lengths),
        offsets=None if offsets is None else torch.tensor(offsets),
    )
    with pytest.raises(InputError, match=r"expected bags within the 5 values\. Pass lengths from 0 that sum"):
        jt.to_dense()
    assert "values [5] torch.int64" in repr(jt)


WRONG_PARTS = [
    (lambda: JaggedTensor(torch.arange(3), torch.rand(1), torch.tensor([3])), "got 1 weights; expected 3"),
    (lambda: JaggedTensor(torch.arange(3), torch.rand(4), torch.tensor([3])), "got 4 weights; expected 3"),
    (
        lambda: JaggedTensor(torch.arange(3), torch.rand(3, 2), torch.tensor([3])),
        r"weights of shape \[3, 2\]; expected one number per value, \[3\]",
    ),
    (
        lambda: JaggedTensor(torch.rand(3, 4), torch.rand(3, 2), torch.tensor([3])),
        r"weights of shape \[3, 2\]; expected one number per value, \[3\], or the shape of the values, \[3, 4\]",
    ),
    (
        lambda: JaggedTensor(torch.rand(3, 4), torch.rand(2, 4), torch.tensor([3])),
        "got 2 weights; expected 3",
    ),
    (lambda: JaggedTensor.from_dense([1, 2]), "got 1 in values; expected a list of tensors"),  # type: ignore[list-item]
    (lambda: JaggedTensor.from_dense([torch.tensor(1)]), "expected a list of tensors"),
    (lambda: JaggedTensor(torch.tensor(3), lengths=torch.tensor([1])), "got values without a dimension"),
    (lambda: JaggedTensor([1, 2], lengths=torch.tensor([2])), "got a list as values"),  # type: ignore[arg-type]
    (lambda: JaggedTensor(torch.arange(2), lengths=[2]), "got a list as lengths"),  # type: ignore[arg-type]
    (lambda: JaggedTensor(torch.arange(2), offsets=[0, 2]), "got a list as offsets"),  # type: ignore[arg-type]
    (lambda: JaggedTensor(torch.arange(2), lengths=torch.tensor(2)), "got lengths without a dimension"),
    (
        lambda: JaggedTensor.from_dense_lengths(torch.rand(2, 3), torch.tensor([1, -1])),
        "got a length of -1; expected 0 or more",
    ),
    (
        lambda: JaggedTensor.from_dense_lengths(torch.rand(2, 3), torch.tensor([1, 2]), torch.rand(2, 4)),
        r"weights of shape \[2, 4\]; expected one number per padded item, \[2, 3\]",
    ),
]


@pytest.mark.parametrize(("attempt", "message"), WRONG_PARTS)
def test_parts_that_do_not_fit_are_refused(attempt: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attempt()


def test_vectors_are_items_of_a_jagged_tensor() -> None:
    jt = JaggedTensor(torch.arange(6).view(3, 2), torch.rand(3), torch.tensor([1, 2]))
    assert [bag.tolist() for bag in jt.to_dense()] == [[[0, 1]], [[2, 3], [4, 5]]]


def test_equality_with_anything_else_is_false() -> None:
    jt = JaggedTensor(torch.arange(2), lengths=torch.tensor([2]))
    for other in (None, 3, jt.values(), object()):
        assert not jt_is_equal(jt, other)
        assert not jt_is_equal(other, jt)
    assert not jt_is_equal(None, None)
    assert not jt_is_equal(jt, jt.to(torch.device("meta")))
    # The same values and lengths, other bags.
    values = torch.arange(3)
    assert not jt_is_equal(
        JaggedTensor(values, offsets=torch.tensor([0, 1, 2])),
        JaggedTensor(values, offsets=torch.tensor([1, 2, 3])),
    )


def test_repr_is_short_and_needs_no_contents() -> None:
    jt = JaggedTensor(torch.arange(1001), torch.ones(1001), torch.ones(1001, dtype=torch.int64))
    assert repr(jt) == "JaggedTensor(values [1001] torch.int64, 1001 bags, weights, device='cpu')"
    assert repr(jt.to(torch.device("meta"))).endswith("device='meta')")
    small = JaggedTensor(torch.arange(2), lengths=torch.tensor([2]))
    assert repr(small) == str(small)


@pytest.mark.parametrize(("bags", "listed"), [(8, "1, 1, 1, 1, 1, 1, 1, 1]"), (9, "1, 1, 1, 1, 1, 1, 1, 1, …]")])
def test_an_error_lists_the_sizes_of_eight_bags(bags: int, listed: str) -> None:
    short = JaggedTensor(torch.arange(3), offsets=torch.arange(bags + 1))
    with pytest.raises(
        InputError, match=f"bags of .{re.escape(listed)} items from 0 on; expected bags within the 3 values"
    ):
        short.to_dense()
