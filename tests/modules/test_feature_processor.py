from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.feature_processor import (
    FeatureProcessor,
    FeatureProcessorDictWrapper,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def random_weights(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 2.0)


def keyed(lengths: dict[str, list[int]], dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Ids 0, 1, 2, … over the bags of each key; keys may have bags of different number."""
    flat = [n for bags in lengths.values() for n in bags]
    strides = [len(bags) for bags in lengths.values()]
    return KeyedJaggedTensor(
        list(lengths),
        torch.arange(sum(flat)),
        lengths=torch.tensor(flat, dtype=dtype),
        stride_per_key_per_rank=[[s] for s in strides] if len(set(strides)) > 1 else None,
    )


def by_hand(lengths: dict[str, list[int]], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weights id by id."""
    out = [
        weights[key][position] if key in weights else torch.ones(())
        for key, bags in lengths.items()
        for bag in bags
        for position in range(bag)
    ]
    return torch.stack(out) if out else torch.zeros(0)


BAGS = st.lists(st.integers(0, 4), max_size=6)


@given(BAGS, st.booleans())
def test_a_position_has_its_weight_and_ids_stay(bags: list[int], by_offsets: bool) -> None:
    module = PositionWeightedModule(4)
    random_weights(module)
    lengths = torch.tensor(bags, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 99, (sum(bags),))
    jagged = JaggedTensor(ids, offsets=offsets) if by_offsets else JaggedTensor(ids, lengths=lengths)
    out = module(jagged)
    assert torch.equal(out.weights(), by_hand({"f": bags}, {"f": module.position_weight}))
    assert torch.equal(out.values(), ids)
    assert out.lengths().tolist() == bags
    assert torch.equal(out.offsets(), offsets)


def test_the_docstring_examples_hold() -> None:
    module = PositionWeightedModule(2)
    with torch.no_grad():
        module.position_weight.copy_(torch.tensor([0.5, 0.2]))
    out = module(JaggedTensor(torch.tensor([7, 7, 8]), lengths=torch.tensor([1, 0, 2])))
    assert out.weights().tolist() == pytest.approx([0.5, 0.5, 0.2])
    several = PositionWeightedModuleCollection({"a": 2, "b": 1})
    several.load_state_dict({"position_weights.a": torch.tensor([0.5, 0.2]), "position_weights.b": torch.tensor([3.0])})
    assert several(keyed({"a": [1, 2], "b": [0, 1]})).weights().tolist() == pytest.approx([0.5, 0.5, 0.2, 3.0])


KEYED_BAGS = st.dictionaries(st.sampled_from(["a", "b", "plain", "c"]), BAGS, max_size=4)


@given(KEYED_BAGS)
def test_a_collection_weighs_every_feature_by_position_and_leaves_others_at_one(
    lengths: dict[str, list[int]],
) -> None:
    module = PositionWeightedModuleCollection({"c": 7, "unused": 1, "a": 4, "b": 5})
    random_weights(module)
    batch = keyed(lengths)
    out = module(batch)
    assert torch.equal(out.weights(), by_hand(lengths, dict(module.position_weights.items())))
    assert torch.equal(out.values(), batch.values())
    assert torch.equal(out.lengths(), batch.lengths())
    assert out.keys() == batch.keys()
    assert out.stride_per_key() == batch.stride_per_key()


@given(KEYED_BAGS)
def test_one_processor_per_feature_equals_the_collection(lengths: dict[str, list[int]]) -> None:
    limits = {key: 4 for key in lengths if key != "plain"}
    collection = PositionWeightedModuleCollection(limits)
    random_weights(collection)
    modules = {key: PositionWeightedModule(4) for key in limits}
    with torch.no_grad():
        for key, module in modules.items():
            module.position_weight.copy_(collection.position_weights[key])
    wrapped = FeatureProcessorDictWrapper(nn.ModuleDict(modules))
    assert torch.equal(wrapped(keyed(lengths)).weights(), collection(keyed(lengths)).weights())


def test_weights_of_the_input_are_replaced_and_inverse_indices_stay() -> None:
    module = PositionWeightedModuleCollection({"a": 3})
    batch = KeyedJaggedTensor(
        ["a"],
        torch.arange(3),
        weights=torch.full((3,), 5.0),
        lengths=torch.tensor([2, 1]),
        stride_per_key_per_rank=[[2]],
        inverse_indices=(["a"], torch.tensor([[0, 1, 1]])),
    )
    out = module(batch)
    assert out.weights().tolist() == [1.0, 1.0, 1.0]
    assert out.inverse_indices()[1].tolist() == [[0, 1, 1]]
    jagged = JaggedTensor(torch.arange(2), weights=torch.full((2,), 5.0), lengths=torch.tensor([2]))
    assert PositionWeightedModule(2)(jagged).weights().tolist() == [1.0, 1.0]


def test_key_offsets_that_are_known_stay_known() -> None:
    batch = keyed({"a": [2, 1], "b": [0, 3]})
    module = PositionWeightedModuleCollection({"a": 3})
    assert module(batch).offset_per_key_or_none() is None
    assert module(batch.sync()).offset_per_key_or_none() == [0, 3, 6]


def test_a_position_weight_gets_the_sum_of_its_gradients() -> None:
    lengths = {"a": [3, 0, 1], "plain": [2, 2, 0], "b": [1, 2, 2]}
    module = PositionWeightedModuleCollection({"a": 5, "b": 2, "unused": 4})
    gradient = torch.arange(1.0, 14.0)
    module(keyed(lengths)).weights().backward(gradient)
    wanted = {key: torch.zeros(n) for key, n in {"a": 5, "b": 2}.items()}
    number = iter(gradient)
    for key, bags in lengths.items():
        for bag in bags:
            for position in range(bag):
                one = next(number)
                if key in wanted:
                    wanted[key][position] += one
    for key, grad in wanted.items():
        assert torch.equal(module.position_weights[key].grad, grad)  # type: ignore[arg-type]
    assert module.position_weights["unused"].grad is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_compiles_in_one_graph_with_gradients(dtype: torch.dtype) -> None:
    lengths = {"a": [3, 0, 1], "plain": [2, 2, 0], "b": [1, 2, 2]}
    module = PositionWeightedModuleCollection({"a": 5, "b": 2})
    random_weights(module)
    one = PositionWeightedModule(3)
    random_weights(one)
    compiled = torch.compile(lambda kjt: module(kjt).weights(), fullgraph=True, backend="aot_eager")
    compiled_one = torch.compile(lambda jt: one(jt).weights(), fullgraph=True, backend="aot_eager")
    batch = keyed(lengths, dtype)
    out = compiled(batch)
    assert torch.equal(out, module(batch).weights())
    gradient = torch.randn(out.shape)
    wanted = torch.autograd.grad(module(batch).weights(), module.parameters(), gradient)
    torch.testing.assert_close(torch.autograd.grad(out, module.parameters(), gradient), wanted)
    assert torch.equal(compiled_one(batch["a"]), one(batch["a"]).weights())
    # another batch size and another number of ids
    other = keyed({"a": [1, 1, 1, 1, 2], "plain": [0] * 5, "b": [2, 0, 0, 0, 1]}, dtype)
    assert torch.equal(compiled(other), module(other).weights())
    too_long = keyed({"a": [1, 1, 1], "plain": [0, 0, 9], "b": [0, 3, 0]}, dtype)
    with pytest.raises(RuntimeError, match=r"max_feature_length of its feature .*\('a', 5\), \('b', 2\)"):
        compiled(too_long)
    with pytest.raises(RuntimeError, match="more ids than max_feature_length=3"):
        compiled_one(JaggedTensor(torch.arange(9), lengths=torch.tensor([5, 4])))


def test_names_of_the_state_are_fixed_and_weights_begin_at_one() -> None:
    one, several = PositionWeightedModule(3), PositionWeightedModuleCollection({"a": 3, "b": 2})
    assert list(one.state_dict()) == ["position_weight"]
    assert list(several.state_dict()) == ["position_weights.a", "position_weights.b"]
    assert all((p == 1).all() for m in (one, several) for p in m.parameters())
    random_weights(several)
    several.reset_parameters()
    assert all((p == 1).all() for p in several.parameters())


def test_meta_modules_can_be_made_real() -> None:
    module = PositionWeightedModuleCollection({"a": 3}, device=torch.device("meta"))
    assert module.position_weights["a"].is_meta
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert module(keyed({"a": [3, 1]})).weights().tolist() == [1.0] * 4
    assert torch.equal(copy.deepcopy(module).position_weights["a"], torch.ones(3))


def test_a_bag_that_is_too_long_is_named() -> None:
    with pytest.raises(InputError, match="got 4 ids in bag 1; expected at most max_feature_length=3"):
        PositionWeightedModule(3)(JaggedTensor(torch.arange(5), lengths=torch.tensor([1, 4])))
    module = PositionWeightedModuleCollection({"a": 2, "b": 3})
    with pytest.raises(InputError, match="Feature 'b': got 4 ids in bag 1; expected at most max_feature_length=3"):
        module(keyed({"a": [1, 2], "plain": [9, 9], "b": [3, 4]}))
    with pytest.raises(InputError, match="Feature 'b': got 4 ids in bag 0"):
        module(keyed({"a": [1, 2, 0], "b": [4, 1]}))


def test_sizes_and_names_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_feature_length: got 0"):
        PositionWeightedModule(0)
    with pytest.raises(ConfigError, match=r"max_feature_lengths\['b'\]: got -1"):
        PositionWeightedModuleCollection({"a": 1, "b": -1})
    for name in ("a.b", "values"):
        with pytest.raises(ConfigError, match=f"feature '{name}' cannot name a parameter"):
            PositionWeightedModuleCollection({name: 1})


class Reverse(FeatureProcessor):
    """Drops the first bag's ids and weighs the rest by their id."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        first = int(features.lengths()[0])
        lengths = features.lengths().clone()
        lengths[0] = 0
        ids = features.values()[first:]
        return JaggedTensor(ids, weights=ids.float() * 2, lengths=lengths)


class Unweighted(FeatureProcessor):
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        return JaggedTensor(features.values(), lengths=features.lengths())


def test_a_processor_may_change_ids_weights_and_lengths() -> None:
    wrapper = FeatureProcessorDictWrapper(nn.ModuleDict({"b": Reverse(), "a": PositionWeightedModule(3)}))
    out = wrapper(keyed({"a": [2, 1], "plain": [1, 0], "b": [1, 2]}))
    assert out.keys() == ["a", "plain", "b"]
    assert out.values().tolist() == [0, 1, 2, 3, 5, 6]
    assert out.weights().tolist() == [1.0, 1.0, 1.0, 1.0, 10.0, 12.0]
    assert out.lengths().tolist() == [2, 1, 1, 0, 0, 2]


def test_a_processor_without_a_feature_or_weights_is_named() -> None:
    wrapper = FeatureProcessorDictWrapper(nn.ModuleDict({"b": Unweighted()}))
    with pytest.raises(InputError, match="Feature 'b': it has a processor but is not in the batch"):
        wrapper(keyed({"a": [1]}))
    with pytest.raises(InputError, match="Feature 'b': its processor Unweighted returned no weights"):
        wrapper(keyed({"b": [1]}))


def test_the_bases_cannot_be_made() -> None:
    for base in (FeatureProcessor, FeatureProcessorsCollection):
        with pytest.raises(TypeError, match="abstract"):
            base()
