"""`KeyedTensor`: named blocks of columns."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import InputError
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.sparse.keys import UnknownKeyError

WIDTHS = st.lists(st.integers(0, 4), min_size=1, max_size=6)


def _example() -> KeyedTensor:
    return KeyedTensor(["x", "y"], [2, 3], torch.arange(10.0).view(2, 5))


@given(WIDTHS, st.integers(0, 3), st.sampled_from([0, 1, 2, -1]))
def test_blocks_come_back_as_they_went_in(widths: list[int], rows: int, dim: int) -> None:
    shape = [rows, rows, rows]
    tensors = []
    for width in widths:
        shape[dim] = width
        tensors.append(torch.rand(shape))
    keys = [f"k{i}" for i in range(len(widths))]
    keyed = KeyedTensor.from_tensor_list(keys, tensors, key_dim=dim, cat_dim=dim)
    assert keyed.keys() == keys
    assert keyed.length_per_key() == widths
    assert keyed.offset_per_key() == [sum(widths[:i]) for i in range(len(widths) + 1)]
    assert keyed.key_dim() == dim
    for key, block, tensor in zip(keys, keyed.to_dict().values(), tensors, strict=True):
        assert torch.equal(block, tensor)
        assert torch.equal(keyed[key], tensor)


@given(WIDTHS, st.data())
def test_regrouping_is_concatenation_of_blocks(widths: list[int], data: st.DataObject) -> None:
    keys = [f"k{i}" for i in range(len(widths))]
    cut = data.draw(st.integers(0, len(widths)))
    inputs = [
        KeyedTensor(keys[:cut], widths[:cut], torch.rand(2, sum(widths[:cut]))),
        KeyedTensor(keys[cut:], widths[cut:], torch.rand(2, sum(widths[cut:]))),
    ]
    groups = data.draw(st.lists(st.lists(st.sampled_from(keys), max_size=5), max_size=4))
    blocks = {**inputs[0].to_dict(), **inputs[1].to_dict()}
    outputs = KeyedTensor.regroup(inputs, groups)
    named = KeyedTensor.regroup_as_dict(inputs, groups, [f"g{i}" for i in range(len(groups))])
    assert list(named) == [f"g{i}" for i in range(len(groups))]
    for group, output, same in zip(groups, outputs, named.values(), strict=True):
        assert torch.equal(output, torch.cat([torch.rand(2, 0), *[blocks[key] for key in group]], dim=1))
        assert torch.equal(output, same)


def test_gradients_of_a_key_in_several_groups_add_up() -> None:
    values = torch.ones(2, 5, requires_grad=True)
    outputs = KeyedTensor.regroup([KeyedTensor(["x", "y"], [2, 3], values)], [["x"], ["y", "x"]])
    (outputs[0].sum() + 10 * outputs[1].sum()).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[11, 11, 10, 10, 10]] * 2


def test_blocks_are_views_and_lists_are_copies() -> None:
    keyed = _example()
    assert keyed["x"].data_ptr() == keyed.values().data_ptr()
    for handed_out in (keyed.keys(), keyed.length_per_key(), keyed.offset_per_key()):
        handed_out.clear()
    assert (keyed.keys(), keyed.length_per_key(), keyed.offset_per_key()) == (["x", "y"], [2, 3], [0, 2, 5])


def test_a_tensor_without_keys_is_empty() -> None:
    keyed = KeyedTensor([], [], torch.zeros(3, 0))
    assert keyed.to_dict() == {}
    assert str(keyed) == "KeyedTensor()\n"


def test_moving_copying_and_pickling_keep_the_blocks() -> None:
    keyed = _example()
    assert keyed.to(torch.device("meta")).device() == torch.device("meta")
    assert keyed.device() == torch.device("cpu")
    assert keyed.size_in_bytes() == 40
    keyed.record_stream(torch.Stream(device="cpu"))
    file = io.BytesIO()
    torch.save(keyed, file)
    file.seek(0)
    for other in (
        keyed.to(torch.device("cpu"), non_blocking=True),
        copy.deepcopy(keyed),
        pickle.loads(pickle.dumps(keyed)),
        torch.load(file, weights_only=True),
    ):
        assert other.columns() == keyed.columns()
        assert torch.equal(other.values(), keyed.values())


def test_pytree_holds_the_values() -> None:
    keyed = _example()
    leaves, spec = pytree.tree_flatten(keyed)
    assert len(leaves) == 1
    doubled = pytree.tree_unflatten([2 * leaves[0]], spec)
    assert torch.equal(doubled["y"], 2 * keyed["y"])
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert pytree.keystr(pytree.tree_flatten_with_path(keyed)[0][0][0]) == ".values"


def test_text_shows_blocks() -> None:
    assert str(_example()) == (
        'KeyedTensor({\n    "x": [[0.0, 1.0], [5.0, 6.0]],\n    "y": [[2.0, 3.0, 4.0], [7.0, 8.0, 9.0]]\n})\n'
    )
    assert repr(_example()) == str(_example())


def test_columns_are_the_keys_dimension_unless_another_is_named() -> None:
    x, y = torch.arange(8.0).view(2, 2, 2), torch.arange(12.0).view(2, 3, 2)
    keyed = KeyedTensor.from_tensor_list(["x", "y"], [x, y])
    assert (keyed.key_dim(), keyed.length_per_key()) == (1, [2, 3])
    assert torch.equal(keyed["y"], y)
    assert KeyedTensor(["x"], [2], torch.ones(3, 2)).key_dim() == 1


def test_what_does_not_fit_is_refused() -> None:
    values = torch.zeros(2, 5)
    for attempt, message in (
        (
            lambda: KeyedTensor(["x", "y"], [2, 2], values),
            r"shape \[2, 5\]; expected 4 along dimension 1, the sum of length_per_key",
        ),
        (lambda: KeyedTensor(["x", "x"], [2, 3], values), "got 'x' at positions"),
        (
            lambda: KeyedTensor(["x", "y"], [2, 3], values, 1, [0, 3, 5]),
            "got an offset_per_key that contradicts",
        ),
        (
            lambda: KeyedTensor(["x", "y"], [2, 3], values, 1, None, {"x": 1, "y": 0}),
            "index_per_key that contradicts",
        ),
        (lambda: KeyedTensor.from_tensor_list([], []), "got an empty list"),
        (lambda: KeyedTensor.from_tensor_list(["x"], [values], 1, 0), "got cat_dim=0 with key_dim=1"),
        (lambda: KeyedTensor.regroup([], [["x"]]), "of 0 tensors"),
        (
            lambda: KeyedTensor.regroup([_example(), KeyedTensor(["z"], [2], values, 0)], [["x"]]),
            "key dimensions",
        ),
        (lambda: KeyedTensor.regroup_as_dict([_example()], [["x"]], ["u", "v"]), "got 2 names; expected 1"),
    ):
        with pytest.raises(InputError, match=message):
            attempt()
    with pytest.raises(UnknownKeyError, match="Unknown key 'q'"):
        _example()["q"]


def test_a_list_of_tensors_is_joined_along_the_key_dimension() -> None:
    keyed = KeyedTensor.from_tensor_list(["x", "y"], [torch.ones(1, 2), torch.zeros(2, 2)], key_dim=0)
    assert (keyed.key_dim(), keyed.length_per_key(), keyed["y"].shape) == (0, [1, 2], (2, 2))


def test_a_tensor_without_keys_may_have_one_dimension() -> None:
    empty = KeyedTensor([], [], torch.tensor([]))
    assert (empty.to_dict(), str(empty)) == ({}, "KeyedTensor()\n")


def test_known_parts_are_taken() -> None:
    keyed = KeyedTensor(["x", "y"], [2, 3], torch.zeros(2, 5), 1, [0, 2, 5], {"x": 0, "y": 1})
    assert keyed.offset_per_key() == [0, 2, 5]


def test_blocks_are_asked_for_by_name_and_never_by_position() -> None:
    keyed = KeyedTensor(["x", "y"], [2, 1], torch.rand(4, 3))
    assert "x" in keyed
    assert "z" not in keyed
    with pytest.raises(TypeError, match="not iterable"):
        list(keyed)  # type: ignore[call-overload]


def test_what_cannot_be_a_keyed_tensor_is_refused() -> None:
    for attempt, message in (
        (lambda: KeyedTensor(["x"], [1], [[1.0]]), "got a list as values"),
        (
            lambda: KeyedTensor(["x"], [1], torch.ones(1)),
            r"got values of shape \[1\]; expected a dimension key_dim=1",
        ),
        (lambda: KeyedTensor(["x"], [1], torch.ones(1, 1), key_dim=-3), "expected a dimension key_dim=-3"),
        (lambda: KeyedTensor(["x"], [1.0], torch.ones(1, 1)), "with a float; expected numbers of columns"),
        (
            lambda: KeyedTensor.regroup([KeyedTensor(["xy"], [1], torch.ones(1, 1))], ["xy"]),
            r"got the string 'xy' as a group; expected a list of keys. Write \['xy'\]",
        ),
    ):
        with pytest.raises(InputError, match=message):
            attempt()


def test_a_tensor_that_cannot_be_shown_is_described() -> None:
    large = KeyedTensor(["x"], [11], torch.ones(100, 11))
    assert repr(large) == "KeyedTensor(keys ['x'], widths [11], values [100, 11] torch.float32, device='cpu')"
    assert str(large) == repr(large)
    meta = large.to(torch.device("meta"))
    assert repr(meta) == repr(large).replace("cpu", "meta")
    shapes = pytree.tree_map(lambda leaf: tuple(leaf.shape), large)
    assert repr(shapes) == "KeyedTensor(keys ['x'], values (100, 11))"
