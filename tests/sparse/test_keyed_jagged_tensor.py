"""`KeyedJaggedTensor`: what its transformations keep, for fixed and variable batches, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilerec.errors import InputError
from tilerec.sparse.jagged_tensor import JaggedTensor, jt_is_equal
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor, kjt_is_equal
from tilerec.sparse.keys import Keys, UnknownKeyError
from tilerec.sparse.validate import validate_keyed_jagged_tensor


@st.composite
def batches(draw: st.DrawFn) -> KeyedJaggedTensor:
    """Any batch: 0 to 5 keys, 0 to 4 bags each; weighted, variable, by offsets, int32, synced, each or not."""
    keys = draw(st.integers(0, 5))
    variable = draw(st.booleans()) and keys > 0
    stride = draw(st.integers(0, 4))
    counts = [[draw(st.integers(0, 3)), draw(st.integers(0, 2))] for _ in range(keys)] if variable else None
    bags = sum(map(sum, counts)) if counts is not None else keys * stride
    lengths = torch.tensor(
        draw(st.lists(st.integers(0, 3), min_size=bags, max_size=bags)),
        dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )
    total = int(lengths.sum())
    offsets = torch.tensor([0, *lengths.cumsum(0).tolist()]) if draw(st.booleans()) else None
    kjt = KeyedJaggedTensor(
        [f"f{i}" for i in range(keys)],
        torch.arange(100, 100 + total),
        torch.arange(total) / 8 if draw(st.booleans()) else None,
        None if offsets is not None else lengths,
        offsets,
        stride=None if variable else stride,
        stride_per_key_per_rank=counts,
    )
    return kjt.sync() if draw(st.booleans()) else kjt


def _features(kjt: KeyedJaggedTensor) -> dict[str, tuple[list[Any], list[Any] | None]]:
    """Every feature's bags and weights, read bag by bag from the flat tensors: the meaning of the layout."""
    offsets = kjt.offsets().tolist()
    values, weights = kjt.values().tolist(), kjt.weights_or_none()
    features = {}
    first = 0
    for key, stride in zip(kjt.keys(), kjt.stride_per_key(), strict=True):
        spans = [(offsets[bag], offsets[bag + 1]) for bag in range(first, first + stride)]
        bag_weights = None if weights is None else [weights.tolist()[start:end] for start, end in spans]
        features[key] = ([values[start:end] for start, end in spans], bag_weights)
        first += stride
    return features


def _example(**extra: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([10, 11, 12, 13, 14]),
        torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0]),
        torch.tensor([2, 0, 1, 2]),
        **extra,
    )


def _variable(**extra: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(6),
        lengths=torch.tensor([1, 2, 3]),
        stride_per_key_per_rank=[[1], [2]],
        **extra,
    )


def _inverse() -> tuple[list[str], Tensor]:
    return ["a", "b"], torch.tensor([[0, 0, 0, 0], [1, 0, 1, 0]])


@given(batches())
def test_the_keys_bags_are_the_flat_tensors_bags(kjt: KeyedJaggedTensor) -> None:
    features = _features(kjt)
    bounds = kjt.offset_per_key()
    assert bounds[0] == 0
    assert bounds[-1] == kjt.values().shape[0]
    assert kjt.length_per_key() == [end - start for start, end in pairwise(bounds)]
    assert kjt.index_per_key() == {key: position for position, key in enumerate(features)}
    assert kjt.lengths_offset_per_key()[-1] == kjt.lengths().shape[0]
    for compute_offsets in (True, False):
        kjt._jt_dict = None
        by_key = kjt.to_dict(compute_offsets)
        assert list(by_key) == list(features)
        for key, jagged in by_key.items():
            bags, weights = features[key]
            assert [bag.tolist() for bag in jagged.to_dense()] == bags
            bag_weights = jagged.to_dense_weights()
            assert (None if bag_weights is None else [bag.tolist() for bag in bag_weights]) == weights
            assert jagged.offsets().tolist() == [sum(map(len, bags[:b])) for b in range(len(bags) + 1)]
            assert jt_is_equal(jagged, kjt[key])
    kjt._jt_dict = None
    assert all(jt_is_equal(kjt[key], jagged) for key, jagged in kjt.to_dict().items())


@given(batches(), st.data())
def test_a_permutation_moves_whole_features(kjt: KeyedJaggedTensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(kjt.keys()))))
    order = order[: data.draw(st.integers(0, len(order)))]
    features, known = _features(kjt), kjt.offset_per_key_or_none() is not None
    tensor = torch.tensor(order, dtype=torch.int64) if data.draw(st.booleans()) else None
    permuted = kjt.permute(list(order), tensor)
    keys = [kjt.keys()[position] for position in order]
    assert permuted.keys() == keys
    assert _features(permuted) == {key: features[key] for key in keys}
    assert permuted.lengths().dtype == kjt.lengths().dtype
    if known:
        assert permuted.offset_per_key_or_none() is not None
    fetched = permuted.offset_per_key()
    assert permuted.unsync().offset_per_key() == fetched
    assert permuted.variable_stride_per_key() == kjt.variable_stride_per_key()
    if keys and not kjt.variable_stride_per_key():
        assert permuted.stride() == kjt.stride()


@given(batches(), st.data())
def test_a_permutation_and_its_inverse_cancel(kjt: KeyedJaggedTensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(kjt.keys()))))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    assert kjt_is_equal(kjt.permute(list(order)).permute(inverse), kjt)


@given(batches(), st.data())
def test_permutations_compose(kjt: KeyedJaggedTensor, data: st.DataObject) -> None:
    one = data.draw(st.permutations(range(len(kjt.keys()))))
    two = data.draw(st.permutations(range(len(kjt.keys()))))
    both = [one[position] for position in two]
    assert kjt_is_equal(kjt.permute(list(one)).permute(list(two)), kjt.permute(both))


@given(batches(), st.data())
def test_concat_undoes_split(kjt: KeyedJaggedTensor, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(kjt.keys())), max_size=4)))
    bounds = [0, *cuts, len(kjt.keys())]
    segments = [end - start for start, end in pairwise(bounds)]
    features = _features(kjt)
    parts = kjt.split(segments)
    assert [len(part.keys()) for part in parts] == segments
    for part in parts:
        assert _features(part) == {key: features[key] for key in part.keys()}  # noqa: SIM118 - not a dict
        fetched = part.offset_per_key()
        assert part.unsync().offset_per_key() == fetched
    joined = KeyedJaggedTensor.concat(parts)
    synced, unsynced = [part.sync() for part in parts], [part.unsync() for part in kjt.split(segments)]
    for known in (synced, unsynced, [*synced[:1], *unsynced[1:]]):
        assert KeyedJaggedTensor.concat(known).offset_per_key() == kjt.offset_per_key()
    if kjt.keys():
        assert kjt_is_equal(joined, kjt)
    assert _features(joined) == features


@given(batches())
def test_from_jt_dict_undoes_to_dict(kjt: KeyedJaggedTensor) -> None:
    again = KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    assert _features(again) == _features(kjt)
    # Equal batch sizes make a fixed batch, wherever they came from.
    assert again.variable_stride_per_key() == (len(set(kjt.stride_per_key())) > 1)
    forced = KeyedJaggedTensor.from_jt_dict(kjt.to_dict(), force_variable_stride=True)
    assert forced.variable_stride_per_key() == bool(kjt.keys())
    assert _features(forced) == _features(kjt)


def test_a_dict_of_one_feature_makes_a_fixed_batch() -> None:
    again = KeyedJaggedTensor.from_jt_dict({"a": _example()["a"]})
    assert again.keys() == ["a"]
    assert not again.variable_stride_per_key()
    assert torch.equal(again.values(), _example()["a"].values())


@given(batches(), st.booleans())
def test_a_pytree_round_trip_is_the_same_batch(kjt: KeyedJaggedTensor, derive: bool) -> None:
    fresh = pytree.tree_structure(kjt)
    if derive:
        kjt.to_dict()
        kjt.offsets()
        kjt.lengths()
    leaves, spec = pytree.tree_flatten(kjt)
    assert spec == fresh  # what was derived is no part of the structure
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert again.stride() == kjt.stride()
    assert kjt_is_equal(again, kjt)
    assert _features(again) == _features(kjt)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@given(batches())
def test_copies_and_pickles_are_equal_and_know_as_much(kjt: KeyedJaggedTensor) -> None:
    file = io.BytesIO()
    torch.save(kjt, file)
    file.seek(0)
    for other in (copy.deepcopy(kjt), pickle.loads(pickle.dumps(kjt)), torch.load(file, weights_only=True)):
        assert kjt_is_equal(other, kjt)
        assert other.offset_per_key_or_none() == kjt.offset_per_key_or_none()
        assert other.stride() == kjt.stride()


@given(batches())
def test_moving_keeps_the_batch_and_converts_only_weights(kjt: KeyedJaggedTensor) -> None:
    moved = kjt.to(torch.device("cpu"), dtype=torch.float64)
    assert _features(moved) == _features(kjt)
    assert moved.stride() == kjt.stride()
    assert moved.values().dtype == kjt.values().dtype
    assert moved.offset_per_key_or_none() == kjt.offset_per_key_or_none()
    if kjt.weights_or_none() is not None:
        assert moved.weights().dtype == torch.float64
    assert kjt_is_equal(kjt.flatten_lengths(), kjt)


def test_accessors_of_a_fixed_batch() -> None:
    kjt = _example()
    assert kjt.keys() == ["a", "b"]
    assert kjt.stride() == 2
    assert kjt.stride_per_key() == [2, 2]
    assert kjt.stride_per_key_per_rank() == []
    assert not kjt.variable_stride_per_key()
    assert kjt.offsets_or_none() is None
    assert kjt.offsets().tolist() == [0, 2, 2, 3, 5]
    assert kjt.offsets_or_none() is kjt.offsets()
    assert kjt.lengths_or_none() is kjt.lengths()
    assert kjt.lengths_offset_per_key() == [0, 2, 4]
    assert kjt.length_per_key_or_none() is None
    assert kjt.offset_per_key_or_none() is None
    assert kjt.sync() is kjt
    assert kjt.offset_per_key_or_none() == [0, 2, 5]
    assert kjt.length_per_key_or_none() == [2, 3]
    assert kjt.unsync().offset_per_key_or_none() is None
    assert kjt.inverse_indices_or_none() is None
    assert kjt.device() == torch.device("cpu")
    assert kjt.size_in_bytes() == 5 * 8 + 5 * 4 + 4 * 8 + 5 * 8


def test_accessors_of_a_variable_batch() -> None:
    kjt = _variable()
    assert kjt.variable_stride_per_key()
    assert kjt.stride() == 2
    assert kjt.stride_per_key() == [1, 2]
    assert kjt.stride_per_key_per_rank() == [[1], [2]]
    assert kjt.lengths_offset_per_key() == [0, 1, 3]
    assert kjt.offset_per_key() == [0, 1, 6]
    assert [bag.tolist() for bag in kjt["b"].to_dense()] == [[1, 2], [3, 4, 5]]
    assert kjt_is_equal(
        _variable(),
        KeyedJaggedTensor(
            ["a", "b"],
            torch.arange(6),
            lengths=torch.tensor([1, 2, 3]),
            stride_per_key_per_rank=torch.tensor([[1], [2]]),
        ),
    )


def test_what_is_handed_out_is_the_callers_own() -> None:
    kjt = _example().sync()
    for handed_out in (kjt.keys(), kjt.offset_per_key(), kjt.length_per_key(), kjt.index_per_key()):
        handed_out.clear()
    assert kjt.keys() == ["a", "b"]
    assert kjt.offset_per_key() == [0, 2, 5]
    assert kjt.index_per_key() == {"a": 0, "b": 1}


def test_a_dict_is_remembered_until_unsync() -> None:
    kjt = _example()
    assert kjt.to_dict() is kjt.to_dict()
    assert kjt["a"] is kjt.to_dict()["a"]
    before = kjt.to_dict()
    assert kjt.unsync().to_dict() is not before


def test_slices_are_views() -> None:
    kjt = _example()
    for part in (kjt["b"], kjt.to_dict()["b"], kjt.split([1, 1])[1]):
        assert part.values().data_ptr() == kjt.values()[2:].data_ptr()


def test_weights_get_their_gradients_through_slices_and_permutations() -> None:
    weights = torch.ones(5, requires_grad=True)
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(5), weights, torch.tensor([2, 0, 1, 2]))
    permuted = kjt.permute([1, 0])
    (permuted["a"].weights() * torch.tensor([2.0, 3.0])).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [2, 3, 0, 0, 0]


def test_two_dimensional_lengths_and_values_are_read() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.rand(3, 4), lengths=torch.tensor([[1, 0], [1, 1]]))
    assert kjt.lengths().tolist() == [1, 0, 1, 1]
    assert torch.equal(kjt.permute([1, 0])["b"].values(), kjt.values()[1:])


def test_factories_fetch_key_offsets_at_once() -> None:
    by_lengths = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(5), torch.tensor([2, 0, 1, 2]))
    by_offsets = KeyedJaggedTensor.from_offsets_sync(["a", "b"], torch.arange(5), torch.tensor([0, 2, 2, 3, 5]))
    assert by_lengths.offset_per_key_or_none() == by_offsets.offset_per_key_or_none() == [0, 2, 5]
    assert kjt_is_equal(by_lengths, by_offsets)
    variable = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], torch.arange(6), torch.tensor([1, 2, 3]), None, None, [[1], [2]], _inverse()
    )
    assert kjt_is_equal(variable, _variable(inverse_indices=_inverse()))


def test_inverse_indices_follow_their_keys() -> None:
    kjt = _variable(inverse_indices=_inverse())
    assert kjt.stride() == 4
    permuted = kjt.permute([1, 0])
    assert permuted.inverse_indices()[0] == ["b", "a"]
    assert permuted.inverse_indices()[1].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]
    assert permuted.stride() == 4
    parts = kjt.split([1, 1])
    assert [part.inverse_indices()[1].tolist() for part in parts] == [[[0, 0, 0, 0]], [[1, 0, 1, 0]]]
    assert kjt_is_equal(KeyedJaggedTensor.concat(parts), kjt)
    assert not kjt_is_equal(_variable(), kjt)
    assert kjt_is_equal(copy.deepcopy(kjt), kjt)
    leaves, spec = pytree.tree_flatten(kjt)
    assert kjt_is_equal(pytree.tree_unflatten(leaves, spec), kjt)
    moved = kjt.to(torch.device("meta"))
    assert moved.inverse_indices()[1].device == torch.device("meta")


def test_equality_sees_every_part() -> None:
    base = _example()
    values, weights, lengths = base.values(), base.weights(), base.lengths()
    assert kjt_is_equal(base, _example())
    assert kjt_is_equal(base, KeyedJaggedTensor(["a", "b"], values, weights, offsets=base.offsets()))
    for other in (
        KeyedJaggedTensor(["a", "c"], values, weights, lengths),
        KeyedJaggedTensor(["a", "b"], values + 1, weights, lengths),
        KeyedJaggedTensor(["a", "b"], values, weights + 1, lengths),
        KeyedJaggedTensor(["a", "b"], values, None, lengths),
        KeyedJaggedTensor(["a", "b"], values, weights, lengths.flip(0)),
        KeyedJaggedTensor(["a", "b"], values, weights, lengths, stride_per_key_per_rank=[[2], [2]]),
    ):
        assert not kjt_is_equal(base, other)
    empty = KeyedJaggedTensor([], torch.arange(0), lengths=torch.zeros(0, dtype=torch.int64), stride=3)
    assert not kjt_is_equal(empty, KeyedJaggedTensor([], torch.arange(0), lengths=empty.lengths(), stride=4))


def test_equality_sees_inverse_indices() -> None:
    keys, indices = _inverse()
    base = _variable(inverse_indices=(keys, indices))
    assert kjt_is_equal(base, _variable(inverse_indices=(list(keys), indices.clone())))
    assert not kjt_is_equal(base, _variable())
    assert not kjt_is_equal(_variable(), base)
    assert not kjt_is_equal(base, _variable(inverse_indices=(keys[::-1], indices)))
    assert not kjt_is_equal(base, _variable(inverse_indices=(keys, torch.zeros_like(indices))))


def test_a_batch_without_keys_has_no_weights_unless_asked_for() -> None:
    assert KeyedJaggedTensor.empty().weights_or_none() is None
    assert JaggedTensor.empty().weights_or_none() is None
    assert KeyedJaggedTensor.empty().lengths().dtype == torch.int32


def test_a_batch_without_keys_keeps_its_size() -> None:
    empty = KeyedJaggedTensor.empty(True, None, torch.int64, torch.float16, torch.int64)
    assert (empty.values().dtype, empty.weights().dtype, empty.lengths().dtype) == (
        torch.int64,
        torch.float16,
        torch.int64,
    )
    assert (empty.keys(), empty.stride(), empty.stride_per_key(), empty.to_dict()) == ([], 0, [], {})
    assert empty.offset_per_key() == [0]
    assert empty.lengths_offset_per_key() == [0]
    assert str(empty) == "KeyedJaggedTensor()\n"
    like = KeyedJaggedTensor.empty_like(_example())
    assert (like.keys(), like.stride(), like.weights().dtype) == ([], 2, torch.float32)
    assert _example().permute([]).stride() == 2
    assert [part.stride() for part in _example().split([0, 2])] == [2, 2]
    assert kjt_is_equal(KeyedJaggedTensor.concat([like, _example()]), _example())
    assert KeyedJaggedTensor.concat([like, like]).stride() == 2
    assert KeyedJaggedTensor.from_jt_dict({}).keys() == []


def test_a_batch_without_samples_keeps_its_keys() -> None:
    none = KeyedJaggedTensor(["a", "b"], torch.arange(0), lengths=torch.zeros(0, dtype=torch.int64))
    assert none.stride() == 0
    assert none.offset_per_key() == [0, 0, 0]
    assert none.to_dict()["b"].offsets().tolist() == [0]
    assert none["b"].to_dense() == []
    assert kjt_is_equal(none.permute([1, 0]).permute([1, 0]), none)
    assert kjt_is_equal(KeyedJaggedTensor.concat(none.split([1, 1])), none)


def test_known_parts_are_taken_and_checked() -> None:
    kjt = _example(
        stride=2,
        stride_per_key=[2, 2],
        length_per_key=[2, 3],
        lengths_offset_per_key=[0, 2, 4],
        index_per_key={"a": 0, "b": 1},
    )
    assert kjt.offset_per_key_or_none() == [0, 2, 5]
    assert _example(offset_per_key=[0, 2, 5]).length_per_key_or_none() == [2, 3]
    by_key = _example().to_dict()
    assert _example(jt_dict=by_key)["a"] is by_key["a"]
    for wrong, message in (
        ({"stride_per_key": [1, 2]}, "got stride_per_key="),
        ({"lengths_offset_per_key": [0, 1, 4]}, "got lengths_offset_per_key="),
        ({"index_per_key": {"a": 1, "b": 0}}, "index_per_key that contradicts keys"),
        ({"jt_dict": {"a": by_key["a"]}}, "got a jt_dict with other keys"),
        ({"length_per_key": [5]}, "got 1 lengths per key; expected 2"),
        ({"length_per_key": [2, 2]}, "got lengths that sum to 4; expected 5, the number of values"),
    ):
        with pytest.raises(InputError, match=message):
            _example(**wrong)


def test_copy_overwrites_the_memory() -> None:
    target = _example(inverse_indices=_inverse())
    target.to_dict()
    source = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(5),
        torch.ones(5),
        torch.tensor([1, 1, 1, 2]),
        inverse_indices=(["a", "b"], torch.zeros(2, 4, dtype=torch.int64)),
    )
    pointer = target.values().data_ptr()
    assert target.copy_(source) is target
    assert target.values().data_ptr() == pointer
    assert kjt_is_equal(target, source)
    assert [bag.tolist() for bag in target["a"].to_dense()] == [[0], [1]]
    for other, message in (
        (_example(), "got inverse indices in only one of the tensors"),
        (_variable(inverse_indices=_inverse()), "got a source with other batch sizes by key and rank"),
        (source.permute([1, 0]), r"got a source with keys .*; expected \["),
        (source.to(torch.device("cpu")).permute([0]), r"got a source with keys .*; expected \["),
    ):
        with pytest.raises(InputError, match=message):
            target.copy_(other)


def test_clearing_frees_every_byte() -> None:
    kjt = _example()
    assert kjt.clear_storage() == 5 * 8 + 5 * 4 + 4 * 8
    assert kjt.values().untyped_storage().nbytes() == 0
    assert kjt.lengths().untyped_storage().nbytes() == 0


def test_record_stream_and_pinning_reach_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    kjt = _example(inverse_indices=_inverse())
    kjt.record_stream(torch.Stream(device="cpu"))
    pinned: list[int] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor.data_ptr()) or tensor.clone())
    assert kjt_is_equal(kjt.pin_memory(), kjt)
    assert set(pinned) == {tensor.data_ptr() for tensor in kjt._parts.tensors()}


def test_text_shows_bags_by_key() -> None:
    assert str(_variable()) == 'KeyedJaggedTensor({\n    "a": [[0]],\n    "b": [[1, 2], [3, 4, 5]]\n})\n'
    assert str(_example()) == (
        "KeyedJaggedTensor({\n"
        '    "a": {\n        "values": [[10, 11], []],\n        "weights": [[0.5, 1.0], []]\n    },\n'
        '    "b": {\n        "values": [[12], [13, 14]],\n        "weights": [[2.0], [4.0, 8.0]]\n    }\n'
        "})\n"
    )
    assert repr(_example()) == str(_example())


class _NoWaiting(TorchDispatchMode):
    """Refuses what reads a value off the device. `tolist` reads the memory and is counted by patching it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "it waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variable", [False, True])
def test_a_synced_batch_is_sliced_without_waiting(variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kjt = (_variable() if variable else _example()).sync()
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: pytest.fail("it waits for the device"))
    with torch.device("meta"), _NoWaiting():
        parts = [kjt["b"], *kjt.to_dict().values(), *kjt.split([1, 1]), kjt.permute([1, 0]), kjt.permute([1])]
        parts.append(KeyedJaggedTensor.concat(kjt.split([1, 1])).permute([1, 0]))
        parts.append(kjt.unsync().permute([1, 0]))
    assert {tensor.device.type for part in parts for tensor in (part.values(), part.offsets())} == {"cpu"}


@pytest.mark.parametrize("strides", [None, [[2]]])
def test_a_single_key_is_never_asked_for(strides: list[list[int]] | None) -> None:
    """Reading a number of a fake tensor raises, as a wait may."""
    with FakeTensorMode():
        ids, lengths = (
            torch.empty(3, dtype=torch.int64, device="cuda"),
            torch.empty(2, dtype=torch.int64, device="cuda"),
        )
        kjt = KeyedJaggedTensor(["a"], ids, lengths=lengths, stride_per_key_per_rank=strides)
        assert kjt.sync().length_per_key() == [3]
        assert kjt.unsync().offset_per_key() == [0, 3]
        with pytest.raises(DataDependentOutputException):
            lengths.tolist()


@pytest.mark.parametrize("strides", [None, [[2], [0]]])
@pytest.mark.parametrize("make", ["from_lengths_sync", "from_offsets_sync"])
def test_on_meta_every_key_has_an_equal_number_of_ids_and_the_first_the_remainder(
    make: str, strides: list[list[int]] | None
) -> None:
    ids, bags = torch.arange(5, device="meta"), torch.arange(2 + (make == "from_offsets_sync"), device="meta")
    kjt = getattr(KeyedJaggedTensor, make)(["a", "b"], ids, bags, stride_per_key_per_rank=strides)
    assert kjt.offset_per_key_or_none() == [0, 3, 5]
    assert kjt["b"].values().shape == (2,)
    assert [part.length_per_key() for part in kjt.unsync().split([1, 1])] == [[3], [2]]
    assert kjt.unsync().permute([1, 1]).values().shape == (4,)


def test_on_meta_a_batch_without_keys_is_synced() -> None:
    assert KeyedJaggedTensor.empty(device=torch.device("meta")).sync().offset_per_key() == [0]


def test_keys_can_be_handed_over_ready() -> None:
    keys = Keys.of(["a", "b"])
    kjt = KeyedJaggedTensor(keys, torch.arange(2), lengths=torch.tensor([1, 1]))
    assert kjt.keys() == ["a", "b"]
    assert kjt.permute([1, 0])._parts.keys is kjt.permute([1, 0])._parts.keys


REFUSED = [
    (lambda: _make(["a", "a"], [1, 1]), r"got 'a' at positions \[0, 1\]"),
    (lambda: _make(["a", "b"], [1, 1, 1]), "got 3 lengths; expected a multiple of 2, the number of keys"),
    (lambda: _make(["a", "b"], [1, 1], stride=2), "got 2 lengths with stride=2 and 2 keys; expected 4"),
    (lambda: _make([], [1]), "got 1 lengths without keys"),
    (lambda: _make(["a"], [3]).sync(), "got lengths that sum to 3; expected 2, the number of values"),
    (lambda: KeyedJaggedTensor(["a"], torch.arange(2)), "neither lengths nor offsets"),
    (
        lambda: KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.ones(2)),
        r"got lengths of torch\.float32",
    ),
    (lambda: _make(["a", "b"], [1, 1], stride_per_key_per_rank=[[1]]), "got 1 rows; expected 2"),
    (
        lambda: _make(["a", "b"], [1, 1], stride_per_key_per_rank=[[1], [2]]),
        "got 2 lengths; expected 3, the sum of stride_per_key_per_rank",
    ),
    (lambda: _make(["a"], [1, 1]).weights(), "got no weights"),
    (lambda: _make(["a"], [1, 1]).inverse_indices(), "got no inverse indices"),
    (
        lambda: KeyedJaggedTensor.concat([_make(["a", "b"], [1, 1]).permute([1, 1]), _make(["c"], [2])]),
        r"got 'b' at positions \[0, 1\]",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], torch.arange(3), torch.rand(1), torch.tensor([3])),
        "got 1 weights; expected 3. Pass one weight per value",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], torch.arange(1), torch.rand(2), torch.tensor([1])),
        "got 2 weights; expected 1",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], torch.arange(2), torch.rand(2, 1), torch.tensor([2])),
        r"weights of shape \[2, 1\]; expected one number per value, \[2\]",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], torch.ones(2, 3, dtype=torch.int64), lengths=torch.tensor([2])),
        r"got values of shape \[2, 3\] and torch\.int64; expected one id each, \[N\]. Flatten them",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], torch.tensor(7), lengths=torch.tensor([1])),
        r"got values without a dimension; .* Write values\.reshape\(1\)",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], [1, 2], lengths=torch.tensor([2])),  # type: ignore[arg-type]
        r"got a list as values; expected a torch\.Tensor. Write torch\.as_tensor\(values\)",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], torch.arange(2), [0.5, 1], torch.tensor([2])),  # type: ignore[arg-type]
        "got a list as weights",
    ),
    (lambda: KeyedJaggedTensor(["a"], torch.arange(2), lengths=[2]), "got a list as lengths"),  # type: ignore[arg-type]
    (
        lambda: KeyedJaggedTensor(["a"], torch.arange(2), offsets=(0, 2)),  # type: ignore[arg-type]
        "got a tuple as offsets",
    ),
    (lambda: _make(["a"], [1, 1], stride_per_key_per_rank=[2]), r"got numbers; .* \[\[3\], \[2\]\]"),
    (lambda: _variable(inverse_indices=_inverse()[1]), r"got a Tensor as inverse_indices; expected a pair"),
    (
        lambda: _variable(inverse_indices=(["a", "b"], torch.ones(2, 4))),
        r"got inverse indices of torch\.float32; expected torch\.int64",
    ),
    (
        lambda: _variable(inverse_indices=(["a", "b"], torch.zeros(4, dtype=torch.int64))),
        r"got inverse indices of shape \[4\] for \['a', 'b'\]; expected \[2, batch\]",
    ),
    (
        lambda: _variable(inverse_indices=(["a"], torch.zeros(2, 4, dtype=torch.int64))),
        r"got inverse indices of shape \[2, 4\] for \['a'\]; expected \[1, batch\]",
    ),
    (
        lambda: _variable(inverse_indices=(["a", "x"], _inverse()[1])).permute([1, 0]),
        r"got inverse indices for \['a', 'x'\], none for \['b'\]",
    ),
    (
        lambda: _variable(inverse_indices=(["a", "x"], _inverse()[1])).split([1, 1]),
        r"got inverse indices for \['a', 'x'\], none for \['b'\]",
    ),
    (lambda: _make(["a", "b"], [4, -2]).sync(), "got a negative number of ids for a feature"),
    (lambda: _make(["a", "b"], [1, 1], length_per_key=[3, -1]), "got a negative number of ids for a feature"),
    (lambda: _make(["a"], [1, 1], stride_per_key_per_rank=[[1.5]]), "got floats; expected whole batch sizes"),
    (
        lambda: KeyedJaggedTensor.from_jt_dict({"a": torch.arange(2)}),
        "got a Tensor for 'a'; expected a JaggedTensor",
    ),  # type: ignore[dict-item]
    (lambda: KeyedJaggedTensor.concat([_example(), None]), "got a NoneType in the list"),  # type: ignore[list-item]
    (
        lambda: _example().permute([1, 0], torch.tensor([0])),
        r"got indices_tensor of shape \[1\]; expected \[2\]",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], torch.arange(4), offsets=torch.tensor([1, 3, 4])).sync(),
        "got 1 as the first offset; expected 0",
    ),
    (
        lambda: KeyedJaggedTensor(["a"], torch.arange(4), offsets=torch.tensor([1, 3, 4]))["a"],
        "got 1 as the first offset; expected 0",
    ),
    (lambda: _make(["a", "b"], [1, 1]).permute([2]), r"got index 2; expected one in \[0, 2\)"),
    (lambda: _make(["a", "b"], [1, 1]).split([1]), "sum to the number of keys, 2"),
    (lambda: KeyedJaggedTensor.concat([]), "got an empty list"),
    (
        lambda: KeyedJaggedTensor.concat([_make(["a"], [1, 1]), _make(["a"], [1, 1])]),
        "got 'a' at positions",
    ),
    (
        lambda: KeyedJaggedTensor.concat([_make(["a"], [1, 1]), _make(["b"], [2])]),
        r"got batch sizes 2 .* and 1 .*; expected one batch size",
    ),
    (lambda: KeyedJaggedTensor.concat([_make(["x"], [2]), _example()]), r"got no weights of keys \['x'\]"),
    (
        lambda: KeyedJaggedTensor.concat([_make(["x"], [1, 1]), _variable()]),
        "got no variable batch sizes of keys",
    ),
    (
        lambda: KeyedJaggedTensor.from_jt_dict({"a": _example()["a"], "c": _variable()["a"]}),
        r"got no weights for \['c'\], but for others",
    ),
]


def _make(keys: list[str], lengths: list[int], **extra: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, torch.arange(2), lengths=torch.tensor(lengths), **extra)


@pytest.mark.parametrize(("attempt", "message"), REFUSED)
def test_what_does_not_fit_is_refused(attempt: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attempt()


def test_a_missing_feature_is_named() -> None:
    for kjt in (_example(), _example().sync()):
        kjt.to_dict()
        with pytest.raises(UnknownKeyError, match=r"Unknown key 'c': the keys are \['a', 'b'\]"):
            kjt["c"]


def test_a_dict_of_jagged_tensors_of_offsets_is_read() -> None:
    kjt = KeyedJaggedTensor.from_jt_dict(
        {
            "a": JaggedTensor(torch.tensor([1, 2]), offsets=torch.tensor([0, 2, 2])),
            "b": JaggedTensor(torch.tensor([3]), offsets=torch.tensor([0, 0, 1])),
        }
    )
    assert kjt.lengths().tolist() == [2, 0, 0, 1]
    assert kjt.stride() == 2


def test_inverse_indices_do_not_change_the_size_of_a_uniform_batch() -> None:
    kjt = _example(inverse_indices=_inverse())
    assert kjt.stride() == 2
    assert kjt.lengths_offset_per_key() == [0, 2, 4]
    assert [part.stride() for part in kjt.split([1, 1])] == [2, 2]
    assert kjt.permute([1]).stride() == 2
    assert KeyedJaggedTensor.concat(kjt.split([1, 1])).stride() == 2
    assert validate_keyed_jagged_tensor(kjt)


@pytest.mark.parametrize("inverse", [None, (["a"], torch.tensor([[0, 1, 2, 0]]))], ids=["bare", "inverse"])
def test_a_variable_batch_of_one_key_stays_variable(inverse: tuple[list[str], Tensor] | None) -> None:
    kjt = KeyedJaggedTensor(
        ["a"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 0, 2]),
        stride_per_key_per_rank=[[3]],
        inverse_indices=inverse,
    )
    leaves, spec = pytree.tree_flatten(kjt)
    for same in (
        kjt,
        kjt.sync(),
        kjt.permute([0]),
        kjt.split([1])[0],
        kjt.split([0, 1])[1],
        KeyedJaggedTensor.concat([kjt]),
        KeyedJaggedTensor.concat(kjt.split([0, 1])),
        KeyedJaggedTensor.from_jt_dict(kjt.to_dict(), force_variable_stride=True) if inverse is None else kjt,
        kjt.to(torch.device("cpu")),
        kjt.flatten_lengths(),
        copy.deepcopy(kjt),
        pickle.loads(pickle.dumps(kjt)),
        pytree.tree_unflatten(leaves, spec),
    ):
        assert same.variable_stride_per_key()
        assert same.stride() == (3 if inverse is None else 4)
        assert same.stride_per_key() == [3]
        assert same.stride_per_key_per_rank() == [[3]]
        assert same.lengths_offset_per_key() == [0, 3]
        assert [bag.tolist() for bag in same.to_dict()["a"].to_dense()] == [[1], [], [2, 3]]
        assert same["a"].offsets().tolist() == [0, 1, 1, 3]
        assert kjt_is_equal(same, kjt)
        assert validate_keyed_jagged_tensor(same)


def test_a_part_without_keys_knows_the_batch_size_of_the_whole() -> None:
    for kjt in (_example(), _variable(), _variable(inverse_indices=_inverse())):
        empty, whole = kjt.split([0, 2])
        assert empty.keys() == []
        assert empty.stride() == whole.stride() == kjt.stride()
        assert empty.to_dict() == {}
        leaves, spec = pytree.tree_flatten(empty)
        assert pytree.tree_unflatten(leaves, spec).stride() == kjt.stride()


def test_a_stride_that_a_variable_batch_cannot_have_warns() -> None:
    with pytest.warns(UserWarning, match="got stride=1, which has no effect; expected 2"):
        assert _variable(stride=1).stride() == 2
    with pytest.warns(UserWarning, match="got stride=2, which has no effect; expected 4"):
        assert _variable(stride=2, inverse_indices=_inverse()).stride() == 4
    assert _variable(stride=2).stride() == 2
    assert _variable(stride=4, inverse_indices=_inverse()).stride() == 4


def test_a_variable_batch_may_be_larger_than_its_largest_key() -> None:
    assert _variable(stride=7).stride() == 7


def test_parts_of_a_variable_batch_keep_its_stride() -> None:
    kjt = _variable()
    largest = kjt.stride_per_key().index(kjt.stride())
    others = [key for key in range(len(kjt.keys())) if key != largest]
    part = kjt.permute(others)
    assert max(part.stride_per_key()) < kjt.stride()
    for same in (part, part.to(torch.device("cpu")), copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert same.stride() == kjt.stride()
        assert kjt_is_equal(same, part)
    assert [part.stride() for part in kjt.split([1] * len(kjt.keys()))] == [kjt.stride()] * len(kjt.keys())


def test_an_empty_batch_like_a_variable_one_keeps_its_strides() -> None:
    like = KeyedJaggedTensor.empty_like(_variable())
    assert (like.keys(), like.values().shape, like.lengths().shape) == ([], (0,), (0,))
    assert like.variable_stride_per_key()
    assert like.stride_per_key_per_rank() == _variable().stride_per_key_per_rank()
    assert like.stride() == _variable().stride()
    assert (like.offset_per_key(), like.to_dict()) == ([0], {})
    assert kjt_is_equal(KeyedJaggedTensor.concat([like, _variable()]), _variable())


@pytest.mark.parametrize("variable", [False, True])
def test_an_empty_batch_on_a_device_takes_a_copy(variable: bool) -> None:
    kjt = _variable(inverse_indices=_inverse()) if variable else _example()
    there = KeyedJaggedTensor.empty_like(kjt, torch.device("cpu"))
    assert there.values().data_ptr() != kjt.values().data_ptr()
    assert kjt_is_equal(there.copy_(kjt), kjt)


def test_lengths_of_no_bags_may_be_of_any_type() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([]), lengths=torch.tensor([]))
    assert (kjt.lengths().dtype, kjt.sync().stride(), kjt.offset_per_key()) == (torch.int64, 0, [0, 0, 0])


def test_weights_may_be_as_wide_as_vectors() -> None:
    values, weights = torch.rand(3, 2), torch.rand(3, 2)
    kjt = KeyedJaggedTensor(["a", "b"], values, weights, torch.tensor([1, 2]))
    assert torch.equal(kjt["b"].weights(), weights[1:])
    assert torch.equal(kjt.permute([1, 0]).weights(), weights[[1, 2, 0]])


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("variable", [False, True])
def test_a_permutation_may_repeat_features(variable: bool, synced: bool) -> None:
    kjt = _variable(inverse_indices=_inverse()) if variable else _example()
    before = _features(kjt)
    indices = [1, 0, 1, 1]
    repeated = (kjt.sync() if synced else kjt.unsync()).permute(indices)
    assert repeated.keys() == ["b", "a", "b", "b"]
    assert repeated.index_per_key() == {"b": 3, "a": 1}
    assert repeated.length_per_key() == [kjt.length_per_key()[index] for index in indices]
    assert repeated.stride_per_key() == [kjt.stride_per_key()[index] for index in indices]
    assert repeated.stride() == kjt.stride()
    assert validate_keyed_jagged_tensor(repeated)
    leaves, spec = pytree.tree_flatten(repeated)
    for same in (
        repeated,
        copy.deepcopy(repeated),
        pickle.loads(pickle.dumps(repeated)),
        pytree.tree_unflatten(leaves, spec),
        repeated.to(torch.device("cpu")),
        repeated.permute([0, 1, 2, 3]),
    ):
        assert kjt_is_equal(same, repeated)
        # By name, any of the equal copies; by position, every one of them.
        assert _features(KeyedJaggedTensor.from_jt_dict(same.to_dict()).permute([1, 0])) == before
        parts = same.split([1, 1, 1, 1])
        assert [part.keys() for part in parts] == [["b"], ["a"], ["b"], ["b"]]
        for part, index in zip(parts, indices, strict=True):
            key = kjt.keys()[index]
            assert _features(part)[key] == before[key]
    if variable:
        assert repeated.inverse_indices()[1].tolist() == [_inverse()[1].tolist()[index] for index in indices]


def test_copies_of_a_feature_add_their_gradients() -> None:
    weights = torch.ones(3, requires_grad=True)
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), weights, torch.tensor([1, 0, 0, 2]))
    (kjt.permute([1, 0, 1]).weights() * torch.tensor([1.0, 2, 4, 8, 16])).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [4, 1 + 8, 2 + 16]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_permutation_takes_its_indices_as_a_tensor_of_either_integer(dtype: torch.dtype) -> None:
    for kjt in (_example(), _variable()):
        assert kjt_is_equal(kjt.permute([1, 0], torch.tensor([1, 0], dtype=dtype)), kjt.permute([1, 0]))


def test_equality_with_anything_else_is_false() -> None:
    kjt = _example()
    for other in (None, 3, "a", kjt["a"], kjt.values(), object()):
        assert not kjt_is_equal(kjt, other)
        assert not kjt_is_equal(other, kjt)
    assert not kjt_is_equal(None, None)
    assert not kjt_is_equal(kjt, kjt.to(torch.device("meta")))


def test_lengths_given_as_a_table_stay_one_and_read_flat() -> None:
    table = torch.tensor([[2, 0], [1, 2]])
    for lengths in (table, table.T.contiguous().T, table.int()):
        kjt = KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=lengths)
        assert kjt.stride() == 2
        assert kjt.lengths().tolist() == [2, 0, 1, 2]
        assert kjt.lengths() is kjt.lengths()
        assert kjt.offsets().tolist() == [0, 2, 2, 3, 5]
        assert kjt_is_equal(kjt, KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=table.view(-1)))
        assert kjt.size_in_bytes() == 5 * 8 + lengths.numel() * lengths.element_size() + 5 * 8
        leaves, spec = pytree.tree_flatten(kjt)
        assert [list(leaf.shape) for leaf in leaves] == [[5], [2, 2]]
        for same in (
            pytree.tree_unflatten(leaves, spec),
            pytree.tree_map(lambda leaf: leaf.clone(), kjt),
            copy.deepcopy(kjt),
            kjt.to(torch.device("cpu")),
            kjt.permute([1, 0]).permute([1, 0]),
            KeyedJaggedTensor.concat(kjt.split([1, 1])),
            KeyedJaggedTensor.from_jt_dict(kjt.to_dict()),
            copy.deepcopy(kjt).copy_(kjt),
        ):
            assert kjt_is_equal(same, kjt)
            assert same.to_dict()["b"].offsets().tolist() == [0, 1, 3]
    other = KeyedJaggedTensor(["a", "b"], torch.arange(5) + 9, lengths=torch.tensor([1, 1, 3, 0]))
    assert kjt_is_equal(kjt.copy_(other), KeyedJaggedTensor(["a", "b"], other.values(), lengths=other.lengths().int()))
    # A variable batch has no table, nor has one whose rows are not the keys.
    flat = KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=table, stride_per_key_per_rank=[[2], [2]])
    assert [list(leaf.shape) for leaf in pytree.tree_leaves(flat)] == [[5], [4], [2, 1]]
    flat = KeyedJaggedTensor(["a"], torch.arange(5), lengths=table)
    assert [list(leaf.shape) for leaf in pytree.tree_leaves(flat)] == [[5], [4]]


def test_a_tensor_that_cannot_be_shown_is_described() -> None:
    large = KeyedJaggedTensor(["a"], torch.arange(1001), lengths=torch.tensor([1001]))
    assert repr(large) == "KeyedJaggedTensor(keys ['a'], values [1001] torch.int64, 1 bags, device='cpu')"
    assert str(large) == repr(large)
    many = KeyedJaggedTensor([f"k{i}" for i in range(17)], torch.arange(17), lengths=torch.ones(17, dtype=torch.int64))
    assert str(many).count("\n") == 0
    meta = _example().to(torch.device("meta"))
    described = "KeyedJaggedTensor(keys ['a', 'b'], values [5] torch.int64, 4 bags, weights, device='meta')"
    assert repr(meta) == described
    shapes = pytree.tree_map(lambda leaf: tuple(leaf.shape), _example())
    assert repr(shapes) == "KeyedJaggedTensor(keys ['a', 'b'], values (5,), weights (5,), lengths (4,))"
    for lengths in ([3], [-1, 3], [1]):
        broken = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.tensor(lengths))
        assert repr(broken).startswith("KeyedJaggedTensor(keys ['a'], values [2]")


def test_features_are_asked_for_by_name_and_never_by_position() -> None:
    assert "a" in _example()
    assert "c" not in _example()
    assert 0 not in _example()
    with pytest.raises(TypeError, match="not iterable"):
        list(_example())  # type: ignore[call-overload]


class _Batches(torch.utils.data.Dataset[KeyedJaggedTensor]):
    """Batches by number, uniform and variable in turn."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> KeyedJaggedTensor:
        kjt = _variable(inverse_indices=_inverse()) if number % 2 else _example().sync()
        return pytree.tree_map_only(Tensor, torch.clone, kjt.permute([1, 0, 1]) if number % 3 == 2 else kjt)


def test_batches_come_whole_out_of_worker_processes() -> None:
    direct = [_Batches()[number] for number in range(6)]
    loader = torch.utils.data.DataLoader(_Batches(), batch_size=None, num_workers=1)
    arrived = list(loader)
    assert len(arrived) == 6
    for one, other in zip(arrived, direct, strict=True):
        assert kjt_is_equal(one, other)
        assert one.variable_stride_per_key() == other.variable_stride_per_key()
        assert validate_keyed_jagged_tensor(one)


def test_a_file_of_batches_loads_with_weights_only() -> None:
    for kjt in (_example().sync(), _variable(inverse_indices=_inverse()), _example().permute([0, 0])):
        file = io.BytesIO()
        torch.save({"batch": kjt, "feature": kjt["a"]}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert kjt_is_equal(loaded["batch"], kjt)
        assert jt_is_equal(loaded["feature"], kjt["a"])
