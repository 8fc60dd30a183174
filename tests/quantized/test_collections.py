"""Quantized collections: results have the bits of float collections with the rows that the quantized ones stand for."""

from __future__ import annotations

import copy
import pickle
from typing import cast

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.collection import TableCollection
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.quantized import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    dequantize_rows,
    quantize_tables,
)
from tilerec.quantized.collection import QuantTableCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig

BAGS = [
    EmbeddingBagConfig(100, 10, "a", feature_names=["f", "g"]),
    EmbeddingBagConfig(50, 7, "b", feature_names=["h", "f"], pooling="MEAN"),
    EmbeddingBagConfig(50, 7, "type", feature_names=["i"]),
]
ROWS = [EmbeddingConfig(c.num_embeddings, c.embedding_dim, c.name, feature_names=c.feature_names) for c in BAGS]
TYPES = {"b": "int4", "type": torch.float16}


def batch(weighted: bool = False, most: int = 50) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([2, 0, 1, 3, 0, 0, 1, 4, 2, 2, 1, 0])
    ids = torch.randint(0, most, (16,), generator=generator)
    weights = torch.rand(16, generator=generator) if weighted else None
    return KeyedJaggedTensor(["h", "i", "f", "g"], ids, weights, lengths=lengths)


def represented(collection: TableCollection, quantized: nn.Module) -> TableCollection:
    """The float collection with the rows that the quantized tables stand for."""
    made = copy.deepcopy(collection)
    tables = getattr(quantized, collection._holder)
    for name, table in made._tables.items():
        rows, row_type = tables[name].weight, tables[name].row_type
        floats = dequantize_rows(rows, table.config.embedding_dim, row_type.bits) if row_type.bits else rows
        with torch.no_grad():
            cast(torch.Tensor, table.weight).copy_(floats)
    return made


@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_results_are_those_of_the_rows_it_stands_for(weighted: bool) -> None:
    ebc = EmbeddingBagCollection(BAGS, is_weighted=weighted)
    quantized = quantize_tables(ebc, "int8", per_table=TYPES)
    assert isinstance(quantized, QuantEmbeddingBagCollection)
    assert {name: row.name for name, row in quantized.row_types().items()} == {"a": "int8", "b": "int4", "type": "fp16"}
    got, want = quantized(batch(weighted)), represented(ebc, quantized)(batch(weighted))
    assert got.keys() == want.keys() == ["f@a", "g", "h", "f@b", "i"]
    assert torch.equal(got.values(), want.values())
    assert not got.values().requires_grad
    assert list(quantized.parameters()) == []


def test_rows_of_sequences_are_those_it_stands_for() -> None:
    ec = EmbeddingCollection(ROWS, need_indices=True)
    quantized = quantize_tables(ec, "int2", per_table=TYPES, output_dtype=torch.bfloat16)
    assert isinstance(quantized, QuantEmbeddingCollection)
    got, want = quantized(batch()), represented(ec, quantized)(batch())
    assert list(got) == list(want)
    for name in want:
        assert torch.equal(got[name].values(), want[name].values().bfloat16())
        assert torch.equal(got[name].weights(), want[name].weights())
        assert torch.equal(got[name].lengths(), want[name].lengths())


def test_variable_batches_are_expanded_by_their_inverse_indices() -> None:
    ebc = EmbeddingBagCollection(BAGS[:2])
    quantized = quantize_tables(ebc, "int8")
    index = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 2]])
    kjt = KeyedJaggedTensor(
        ["f", "g", "h"], torch.arange(9), lengths=torch.tensor([2, 1, 3, 1, 0, 2]),
        stride_per_key_per_rank=[[2], [1], [3]], inverse_indices=(["f", "g", "h"], index),
    )  # fmt: skip
    assert torch.equal(quantized(kjt).values(), represented(ebc, quantized)(kjt).values())


def test_ids_outside_a_table_raise_or_are_clamped() -> None:
    quantized = quantize_tables(EmbeddingBagCollection(BAGS), "int8")
    with pytest.raises(InputError, match=r"Table 'a': got id \d+ of feature"):
        quantized(batch(most=10_000))
    ebc = EmbeddingBagCollection(BAGS, on_bad_id="clamp")
    clamping = quantize_tables(ebc, "int8")
    with pytest.warns(UserWarning, match="ids of this batch lay outside"):
        got = clamping(batch(most=10_000)).values()
    with pytest.warns(UserWarning, match="clamped"):
        assert torch.equal(got, represented(ebc, clamping)(batch(most=10_000)).values())


def test_batches_without_a_feature_or_of_another_kind_are_refused() -> None:
    quantized = quantize_tables(EmbeddingBagCollection(BAGS), "int8")
    with pytest.raises(InputError, match="feature 'f' of table 'a' is not in the batch"):
        quantized(KeyedJaggedTensor(["g"], torch.tensor([1]), lengths=torch.tensor([1])))
    with pytest.raises(InputError, match="expected a KeyedJaggedTensor"):
        quantized(torch.zeros(3))


def test_state_is_plain_tensors_that_load_into_the_same_types_only() -> None:
    ebc = EmbeddingBagCollection(BAGS)
    quantized = quantize_tables(ebc, "int8", per_table=TYPES)
    state = quantized.state_dict()
    assert {name: (value.dtype, tuple(value.shape)) for name, value in state.items()} == {
        "embedding_bags.a.weight": (torch.uint8, (100, 16)),
        "embedding_bags.b.weight": (torch.uint8, (50, 8)),
        "embedding_bags.type.weight": (torch.float16, (50, 7)),
    }
    empty = QuantEmbeddingBagCollection(BAGS, ["int8", "int4", "fp16"])
    empty.load_state_dict(state)
    assert torch.equal(empty(batch()).values(), quantized(batch()).values())
    assigned = QuantEmbeddingBagCollection(BAGS, ["int8", "int4", "fp16"], device="meta")
    assigned.load_state_dict(state, assign=True)
    assert torch.equal(assigned(batch()).values(), quantized(batch()).values())
    floats = state | {"embedding_bags.a.weight": torch.zeros(100, 16)}  # the shape of the codes
    with pytest.raises(RuntimeError, match=r"Table 'a': got .*a.weight as torch.float32; expected torch.uint8, int8"):
        empty.load_state_dict(floats)
    assert torch.equal(empty(batch()).values(), quantized(batch()).values())


def test_copies_pickles_and_moves_keep_results() -> None:
    quantized = quantize_tables(EmbeddingBagCollection(BAGS), "int8", per_table=TYPES)
    want = quantized(batch()).values()
    for made in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized)), quantized.to("cpu")):
        assert torch.equal(made(batch()).values(), want)
    assert torch.allclose(quantized.float()(batch()).values(), want)  # fp16 tables become fp32, codes stay


def test_one_graph_compiles_both_collections() -> None:
    pooled = quantize_tables(EmbeddingBagCollection(BAGS), "int8", per_table=TYPES)
    rows = quantize_tables(EmbeddingCollection(ROWS), "int4")

    def both(kjt: KeyedJaggedTensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return pooled(kjt).values(), [jagged.values() for jagged in rows(kjt).values()]

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    kjt = batch().sync()
    got, want = compiled(kjt), both(kjt)
    assert torch.equal(got[0], want[0])
    assert all(map(torch.equal, got[1], want[1]))


def test_an_exported_program_serves_every_batch_size() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = quantize_tables(EmbeddingBagCollection(BAGS[:1]), "int8")

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            pooled: torch.Tensor = self.tables(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)).values()
            return pooled

    model, dynamic = Model(), torch.export.Dim.DYNAMIC
    ids = torch.arange(9)
    example = (ids, torch.tensor([1, 2, 1, 0, 2, 3]))
    exported = torch.export.export(model, example, dynamic_shapes=({0: dynamic}, {0: dynamic}))
    for lengths in (torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 1, 0, 0, 2, 3, 0]), torch.tensor([4, 5])):
        assert torch.equal(exported.module()(ids, lengths), model(ids, lengths))
    assert "tables.embedding_bags.a.weight" in exported.state_dict


@pytest.mark.parametrize(
    ("types", "message"),
    [(["int8"], "got 1 row_types for 3 tables"), (["int8", "int3", "int8"], "row_types: got 'int3'; expected one of")],
)
def test_wrong_row_types_are_refused(types: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantEmbeddingBagCollection(BAGS, types)


def test_other_output_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"output_dtype=torch.float64; expected torch.float32"):
        QuantEmbeddingBagCollection(BAGS, ["int8"] * 3, output_dtype=torch.float64)


def test_a_collection_without_tables_gives_no_columns() -> None:
    empty = QuantEmbeddingBagCollection([], [])
    assert empty(batch()).values().shape == (3, 0)
    assert isinstance(empty, QuantTableCollection)
    assert empty.size_in_bytes() == 0
