"""Quantizing a model: which modules are replaced, what a copy shares, and the memory of the float rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_processor import PositionWeightedModule
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.ops import backends
from tilerec.ops.quantized.row_format import quantize_rows
from tilerec.parallel.shard import shard
from tilerec.quantized import (
    QuantEmbeddingBagCollection,
    QuantManagedCollisionEmbeddings,
    convert,
    quantize_tables,
)
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.testing.virtual import run_virtual_ranks


def table(name: str = "a", rows: int = 50, dim: int = 8) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, dim, name, feature_names=["f"])


def batch(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([1] * len(ids)))


class Model(nn.Module):
    """A table, and a linear layer over its rows."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.again, self.dense = tables, tables, nn.Linear(8, 1)


def test_a_copy_leaves_the_model_as_it_is() -> None:
    model = Model(EmbeddingBagCollection([table()]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = quantize_tables(model, "int8")
    assert isinstance(copied, Model)
    assert copied.tables is copied.again
    assert isinstance(copied.tables, QuantEmbeddingBagCollection)
    assert copied.dense.weight is not model.dense.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_in_place_every_use_of_a_collection_is_replaced() -> None:
    model = Model(EmbeddingBagCollection([table()]).eval())
    dense = model.dense
    assert quantize_tables(model, "int8", inplace=True) is model
    assert isinstance(model.tables, QuantEmbeddingBagCollection)
    assert model.tables is model.again
    assert model.dense is dense
    assert not model.tables.training


def test_in_place_frees_the_float_rows() -> None:
    floats = EmbeddingBagCollection([table("a"), table("b")])
    quantize_tables(nn.Sequential(floats), "int8", inplace=True)
    with pytest.raises(InputError, match=r"Table 'a': its rows have no memory \(its storage was freed\)"):
        floats(batch(1))


def test_rows_that_another_tensor_reads_are_kept() -> None:
    floats = EmbeddingBagCollection([table("a"), table("b")])
    state = floats.state_dict()
    before = state["embedding_bags.b.weight"].clone()
    quantize_tables(nn.Sequential(floats), "int8", inplace=True)
    assert torch.equal(state["embedding_bags.b.weight"], before)
    numbers = torch.ones(50, 8).numpy()
    wrapped = EmbeddingBagCollection([table()])
    wrapped.embedding_bags["a"].weight = nn.Parameter(torch.from_numpy(numbers))
    quantize_tables(nn.Sequential(wrapped), "int8", inplace=True)
    assert (numbers == 1).all()


def tied() -> tuple[EmbeddingBagCollection, EmbeddingCollection]:
    """Two collections of one table."""
    first = EmbeddingBagCollection([table()])
    second = EmbeddingCollection([EmbeddingConfig(50, 8, "a", feature_names=["f"])])
    second.embeddings["a"].weight = first.embedding_bags["a"].weight
    return first, second


def test_rows_tied_to_a_table_of_another_model_are_kept() -> None:
    first, second = tied()
    want = second(batch(3))["f"].values()
    quantize_tables(nn.Sequential(first), "int8", inplace=True)
    assert torch.equal(second(batch(3))["f"].values(), want)


def test_tied_tables_become_one() -> None:
    first, second = tied()
    made = quantize_tables(nn.ModuleList([first, second]), "int8", inplace=True)
    assert isinstance(made, nn.ModuleList)
    assert made[0].embedding_bags["a"] is made[1].embeddings["a"]
    assert torch.equal(made[0](batch(3)).values(), made[1](batch(3))["f"].values())


def test_a_table_that_cannot_be_quantized_changes_nothing() -> None:
    floats = EmbeddingBagCollection([table("a"), table("b")])
    model = nn.Sequential(floats)
    with torch.no_grad():
        floats.embedding_bags["b"].weight[7, 1] = torch.nan
    with pytest.raises(InputError, match="Table 'b': got nan in row 7"):
        quantize_tables(model, "int8", inplace=True)
    assert model[0] is floats
    floats(batch(1))
    mixed = quantize_tables(model, "int8", per_table={"b": torch.float32})  # floats may be anything
    assert mixed[0].row_types()["b"].bits == 0  # type: ignore[index, operator]


def test_unknown_tables_and_models_without_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got per_table for \['x'\]; expected tables of \['a'\]"):
        quantize_tables(EmbeddingBagCollection([table()]), "int8", per_table={"x": "int8"})
    with pytest.raises(ConfigError, match="got a Linear without embedding collections"):
        quantize_tables(nn.Linear(2, 2), "int8")


def test_a_sharded_model_is_refused() -> None:
    def on_rank(group: Group) -> None:
        model = nn.Sequential(EmbeddingBagCollection([table()]))
        shard(model, env=group)
        with pytest.raises(ConfigError, match="Table 'a': got a sharded table; expected a whole one"):
            quantize_tables(model, "int8")

    run_virtual_ranks(1, on_rank)


def test_tables_behind_feature_processors_have_their_own_type() -> None:
    weighted = EmbeddingBagCollection([table()], is_weighted=True)
    model = nn.ModuleList(
        [
            FeatureProcessedEmbeddingBagCollection(weighted, {"f": PositionWeightedModule(4)}),
            EmbeddingBagCollection([table("b")]),
        ]
    )
    made = quantize_tables(model, "int8", processed_dtype="int4")
    assert isinstance(made, nn.ModuleList)
    assert made[0]._embedding_bag_collection.row_types()["a"].name == "int4"
    assert made[1].row_types()["b"].name == "int8"
    with torch.no_grad():
        assert made[0](batch(1, 2)).values().shape == (2, 8)


def test_managed_collision_stays_in_front_and_is_read_only() -> None:
    config = EmbeddingBagConfig(64, 8, "a", feature_names=["f"])
    ids = ManagedCollisionCollection({"a": HashZchManagedCollisionModule(64, total_num_buckets=1)}, [config])
    floats = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection([config]), ids, True)
    floats(batch(10**12, -5))
    floats.eval()
    for made in (quantize_tables(floats, "int8"), quantize_tables(nn.Sequential(floats), "int8", inplace=True)[0]):  # type: ignore[index]
        assert isinstance(made, QuantManagedCollisionEmbeddings)
        made.train()
        before = {name: value.clone() for name, value in made.state_dict().items()}
        pooled, rows = made(batch(10**12, -5, 77))
        assert rows is not None
        assert pooled.values().shape == (3, 8)
        assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert {name.replace("embedding_bags", "") for name in before} == {
        name.replace("embedding_bags", "") for name in floats.state_dict()
    }


def resident() -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", text)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not backends.NATIVE_CPU, reason="pages are released by the native library")
@pytest.mark.parametrize("owned", [True, False])
def test_peak_memory_in_place(owned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(EmbeddingBagCollection([table(name, 65_536, 64) for name in "abcd"]))  # 16 MiB each
    quantize_tables(EmbeddingBagCollection([table()]), "int8")  # torch's own first-call memory
    also_read = None if owned else model.state_dict()
    seen: list[int] = []

    def quantized(*args: Any) -> Tensor:
        made = quantize_rows(*args)
        seen.append(resident())
        return made

    monkeypatch.setattr(convert, "quantize_rows", quantized)
    before = resident()
    quantize_tables(model, "int8", inplace=True)
    result = model[0].size_in_bytes()
    assert result == 4 * 65_536 * 68
    slack = 8 << 20  # temporaries of a chunk, and the heap's growth
    # A table's pages go back before the next one is converted: its own result is all that comes on top.
    assert max(seen) <= before + (result / 4 if owned else result * 1.05) + slack
    assert (resident() < before - (32 << 20)) == (also_read is None)
