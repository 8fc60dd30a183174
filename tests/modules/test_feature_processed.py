from __future__ import annotations

import copy
import io

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_processor import (
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

LENGTHS = {"b": [1, 0, 3], "extra": [1, 1, 0], "a": [2, 2, 1]}


def tables(is_weighted: bool = True) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(20, 3, "t1", feature_names=["a"]),
        EmbeddingBagConfig(20, 5, "t2", feature_names=["b", "a"], pooling="mean"),
    ]
    return EmbeddingBagCollection(configs, is_weighted=is_weighted)


def batch(lengths: dict[str, list[int]] = LENGTHS) -> KeyedJaggedTensor:
    flat = torch.tensor([n for bags in lengths.values() for n in bags], dtype=torch.int64)
    return KeyedJaggedTensor.from_lengths_sync(list(lengths), torch.arange(int(flat.sum())), flat)


def module(as_collection: bool) -> FeatureProcessedEmbeddingBagCollection:
    processors = (
        PositionWeightedModuleCollection({"a": 2, "b": 4})
        if as_collection
        else {"a": PositionWeightedModule(2), "b": PositionWeightedModule(4)}
    )
    made = FeatureProcessedEmbeddingBagCollection(tables(), processors)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "position" in name:
                parameter.uniform_(0.5, 2.0)
    return made


def position_weights(made: FeatureProcessedEmbeddingBagCollection, as_collection: bool) -> dict[str, torch.Tensor]:
    names = {n.split(".")[2 if as_collection else 1]: p for n, p in made.named_parameters() if "position" in n}
    assert sorted(names) == ["a", "b"]
    return names


@pytest.mark.parametrize("as_collection", [True, False])
def test_rows_are_pooled_with_their_position_weights(as_collection: bool) -> None:
    made = module(as_collection).double()
    weights = position_weights(made, as_collection)
    rows = {n.split(".")[2]: p for n, p in made.named_parameters() if "embedding_bags" in n}
    features = batch()
    out = made(features)
    assert out.keys() == ["a@t1", "b", "a@t2"]
    wanted = []
    for feature, table, mean in (("a", "t1", False), ("b", "t2", True), ("a", "t2", True)):
        bags = features[feature].to_dense()
        for bag in bags:
            total = sum(
                (weights[feature][p] * rows[table][int(i)] for p, i in enumerate(bag)),
                torch.zeros(rows[table].shape[1], dtype=torch.float64),
            )
            wanted.append(total / max(len(bag), 1) if mean else total)
    blocks = [torch.stack(wanted[3 * f : 3 * f + 3]) for f in range(3)]
    torch.testing.assert_close(out.values(), torch.cat(blocks, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("as_collection", [True, False])
def test_gradients_reach_position_weights_and_rows(as_collection: bool) -> None:
    made = module(as_collection)
    made(batch()).values().sum().backward()
    for feature, weight in position_weights(made, as_collection).items():
        assert weight.grad is not None
        limit = {"a": 2, "b": 3}[feature]  # no bag of b has a fourth id
        assert (weight.grad[:limit] != 0).all()
        assert (weight.grad[limit:] == 0).all()
    assert all(p.grad is not None for p in made.parameters())


@pytest.mark.parametrize("as_collection", [True, False])
def test_it_compiles_in_one_graph(as_collection: bool) -> None:
    made = module(as_collection)
    compiled = torch.compile(lambda f: made(f).values(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch()), made(batch()).values())


@pytest.mark.parametrize("as_collection", [True, False])
def test_an_exported_model_runs_after_a_save_and_load_on_other_batch_sizes(as_collection: bool) -> None:
    model = module(as_collection).eval()
    example = (batch(),)
    shapes = torch.export.ShapesCollection()
    for tensor in (example[0].values(), example[0].lengths()):
        shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=shapes)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
        for size in (1, 4, 6):
            inputs = (batch({key: [1] * size for key in LENGTHS}),)
            torch.testing.assert_close(loaded(*inputs).values(), model(*inputs).values())


def test_names_of_the_state_are_fixed() -> None:
    rows = [f"_embedding_bag_collection.embedding_bags.{t}.weight" for t in ("t1", "t2")]
    assert list(module(True).state_dict()) == rows + [f"_feature_processors.position_weights.{f}" for f in "ab"]
    assert list(module(False).state_dict()) == rows + [f"_feature_processors.{f}.position_weight" for f in "ab"]


@pytest.mark.parametrize("as_collection", [True, False])
def test_the_two_stages_in_a_row_are_the_module(as_collection: bool) -> None:
    made = module(as_collection)
    processors, bags = made.split()
    assert isinstance(processors, FeatureProcessorsCollection)
    assert torch.equal(bags(processors(batch())).values(), made(batch()).values())
    assert made.is_weighted()
    assert made.embedding_bag_configs() == bags.embedding_bag_configs()
    assert made.device.type == "cpu"
    assert torch.equal(copy.deepcopy(made)(batch()).values(), made(batch()).values())


def test_batches_without_samples_or_ids_work() -> None:
    made = module(False)
    assert made(batch({"a": [], "b": []})).values().shape == (0, 13)
    assert not made(batch({"a": [0, 0], "b": [0, 0]})).values().any()


def test_half_precision_modules_work() -> None:
    made = module(True)
    wanted = made(batch()).values()
    made.to(torch.bfloat16)
    out = made(batch()).values()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=0.05, atol=0.02)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in made.parameters())


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="Build it with is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(tables(is_weighted=False), PositionWeightedModuleCollection({}))
    with pytest.raises(ConfigError, match=r"missing: \['b'\]; not read by any table: \['c'\]"):
        FeatureProcessedEmbeddingBagCollection(
            tables(), {"a": PositionWeightedModule(2), "c": PositionWeightedModule(2)}
        )
