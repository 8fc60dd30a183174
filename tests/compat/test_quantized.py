"""TorchRec's names of quantization: their arguments, and shards of one process against the whole collection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.compat.quantized import (
    QuantEmbeddingBagCollection,
    quantize_embeddings,
    quantize_inference_model,
)
from tilerec.compat.quantized_shards import shard_quant_model
from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_processor import PositionWeightedModule
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig

BAGS = [
    EmbeddingBagConfig(100, 16, "a", feature_names=["f", "g"]),
    EmbeddingBagConfig(50, 8, "b", feature_names=["h", "f"], pooling="MEAN"),
    EmbeddingBagConfig(50, 7, "c", feature_names=["i"]),
]
ROWS = [EmbeddingConfig(c.num_embeddings, 8, c.name, feature_names=c.feature_names) for c in BAGS]
LENGTHS = torch.tensor([2, 0, 1, 3, 0, 0, 1, 4, 2, 2, 1, 0])


def batch(weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (16,), generator=generator)
    weights = torch.rand(16, generator=generator) if weighted else None
    return KeyedJaggedTensor(["h", "i", "f", "g"], ids, weights, lengths=LENGTHS)


def only(kind: str, *tables: str) -> dict[str, Any]:
    return {name: SimpleNamespace(sharding_types=[kind]) for name in tables}


def test_quantize_embeddings_takes_torchs_dtypes_and_output_dtype() -> None:
    model = nn.Sequential(EmbeddingBagCollection(BAGS))
    per_table = {"a": torch.quint4x2, "b": torch.quint2x4, "c": torch.float16}
    made = quantize_embeddings(
        model, torch.qint8, inplace=False, output_dtype=torch.float16, per_table_weight_dtype=per_table
    )
    assert isinstance(made, nn.Sequential)
    assert isinstance(model[0], EmbeddingBagCollection)
    assert [own.name for own in made[0].row_types().values()] == ["int4", "int2", "fp16"]
    assert made[0](batch()).values().dtype == torch.float16
    with pytest.warns(UserWarning, match="quantize_embeddings: got settings without effect: additional_mapping"):
        quantize_embeddings(model, torch.qint8, False, additional_mapping={})


def test_quantize_inference_model_works_in_place_with_a_type_for_processed_tables() -> None:
    weighted = EmbeddingBagCollection([EmbeddingBagConfig(50, 8, "p", feature_names=["f"])], is_weighted=True)
    processed = FeatureProcessedEmbeddingBagCollection(weighted, {"f": PositionWeightedModule(4)})
    model = nn.ModuleList([processed, EmbeddingBagCollection(BAGS)])
    assert quantize_inference_model(model, fp_weight_dtype=torch.quint4x2) is model
    assert processed._embedding_bag_collection.row_types()["p"].name == "int4"
    assert isinstance(model[1], QuantEmbeddingBagCollection)
    with pytest.warns(UserWarning, match="quantization_mapping"):
        quantize_inference_model(nn.Sequential(EmbeddingBagCollection(BAGS)), {})


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("constraints", "exact"),
    [
        ({}, True),
        (only("column_wise", "a", "b", "c"), True),
        (only("row_wise", "b"), False),
        (only("row_wise", "a", "b", "c"), False),
        (only("row_wise", "a") | only("column_wise", "b"), False),
    ],
)
def test_shards_have_the_whole_collections_results(constraints: dict[str, Any], exact: bool, weighted: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(EmbeddingBagCollection(BAGS, is_weighted=weighted))
    quantize_inference_model(model, per_table_weight_dtype={"a": torch.quint4x2, "c": torch.float16})
    want = model[0](batch(weighted))
    sharded, plan = shard_quant_model(model, 3, "cpu", constraints=constraints)
    assert sharded is model
    got = model[0](batch(weighted))
    assert got.keys() == want.keys()
    # Sums over row ranges may round differently.
    torch.testing.assert_close(got.values(), want.values(), rtol=0, atol=0 if exact else 1e-6)
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan
    assert again.world_size == 3


def test_shards_of_sequences_have_the_whole_collections_rows() -> None:
    model = nn.Sequential(EmbeddingCollection(ROWS))
    quantize_inference_model(model)
    want = model[0](batch())
    shard_quant_model(model, 2, "cpu")
    got = model[0](batch())
    assert list(got) == list(want)
    assert all(torch.equal(got[name].values(), want[name].values()) for name in want)
    assert all(torch.equal(got[name].lengths(), want[name].lengths()) for name in want)


def test_a_plan_of_another_run_shards_alike() -> None:
    models = [nn.Sequential(EmbeddingBagCollection(BAGS)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        quantize_inference_model(model)
    _, plan = shard_quant_model(models[0], 2, "cpu", constraints=only("row_wise", "a"))
    shard_quant_model(models[1], 2, "cpu", sharding_plan=plan)
    assert torch.equal(models[0][0](batch()).values(), models[1][0](batch()).values())


def test_ids_outside_a_row_range_table_raise() -> None:
    model = nn.Sequential(EmbeddingBagCollection(BAGS))
    quantize_inference_model(model)
    shard_quant_model(model, 2, "cpu", constraints=only("row_wise", "a", "b"))
    for bad in (-1, 100):
        ids = batch().values().clone()
        ids[12] = bad
        with pytest.raises(InputError, match=r"Table '[ab]\[\d+:0\]': got id -?\d+ of feature"):
            model[0](KeyedJaggedTensor(["h", "i", "f", "g"], ids, lengths=LENGTHS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 2, "compute_device": "tpu"}, "got compute_device='tpu' and world_size=2"),
        ({"world_size": 0, "compute_device": "cpu"}, "world_size=0"),
        ({"compute_device": "cpu", "ddr_cap": 100}, "got 100 B per device; expected at least"),
        (
            {"compute_device": "cpu", "constraints": only("data_parallel", "a")},
            r"got sharding_types \['data_parallel'\]",
        ),
        ({"compute_device": "cpu", "sharding_plan": ShardingPlan({})}, "got a plan without the tables of module '0'"),
    ],
)
def test_shards_that_cannot_be_made_are_refused_and_change_nothing(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential(EmbeddingBagCollection(BAGS))
    with pytest.raises(ConfigError, match="without quantized collections"):
        shard_quant_model(model, compute_device="cpu")
    quantize_inference_model(model)
    with pytest.raises(ConfigError, match=message):
        shard_quant_model(model, **options)
    assert isinstance(model[0], QuantEmbeddingBagCollection)


def test_cuts_inside_a_byte_and_cut_sequences_are_refused() -> None:
    model = nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(10, 18, "a", feature_names=["f"])]))
    quantize_inference_model(model, quantization_dtype=torch.quint2x4)
    with pytest.raises(ConfigError, match="Table 'a': got columns from 9 of int2 rows; expected a multiple of 4"):
        shard_quant_model(model, 2, "cpu", constraints=only("column_wise", "a"))
    rows = nn.Sequential(EmbeddingCollection(ROWS))
    quantize_inference_model(rows)
    with pytest.raises(ConfigError, match="Table 'a': got a sharding that cuts a table of an EmbeddingCollection"):
        shard_quant_model(rows, 2, "cpu", constraints=only("row_wise", "a"))
