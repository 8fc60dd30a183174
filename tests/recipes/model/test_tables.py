"""Tables of the recipes' models: shared tables, managed ids, and ids that training has not seen."""

from __future__ import annotations

import copy
from typing import Any

import pyarrow as pa
import pytest
import torch

from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.dataset import SparseFeature
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError
from tilerec.models.dlrm import DLRM
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model.dlrm import DLRMConfig
from tilerec.recipes.model.linear import LinearConfig
from tilerec.recipes.model.mlp import MLPConfig
from tilerec.recipes.model.tables import ManagedIds
from tilerec.spec.optimizer import SGD
from tilerec.train.evaluate import predict
from tilerec.train.optimizers import attach

CPU = torch.device("cpu")
COLUMNS = Columns(
    labels=(LabelColumn("click"),),
    dense=(DenseColumn("price"),),
    ids=(
        IdColumn("user", table="people"),
        IdColumn("friends", kind="list", table="people", weights="closeness"),
        IdColumn("item"),
    ),
    tables=(TableRows("people", 40, "managed"), TableRows("item", 7, "rows")),
)


def _ids(users: list[int]) -> list[int]:
    """Return the 64-bit hashes that the model gets for users."""
    (batch,) = _dataset(users).train(len(users))
    return batch.sparse_features["user"].values().tolist()


def _dataset(users: list[int]) -> TableDataset:
    rows = len(users)
    table = pa.table(
        {
            "user": users,
            "friends": [[user, user + 1] for user in users],
            "closeness": [[1.0, 0.5]] * rows,
            "item": [i % 7 for i in range(rows)],
            "price": [0.5] * rows,
            "click": [i % 2 for i in range(rows)],
        }
    )
    return TableDataset(table, COLUMNS)


@pytest.mark.parametrize(
    ("managed", "rows", "wanted"),
    [
        (ManagedIds(), 1, (16, 1_024)),
        (ManagedIds(), 5_000, (78, 5_070)),
        (ManagedIds(), 1_000_000, (768, 1_000_704)),
        (ManagedIds(buckets=3), 40, (3, 42)),
        (ManagedIds(buckets=1), 40, (1, 40)),
    ],
)
def test_tables_with_managed_ids_have_whole_buckets(managed: ManagedIds, rows: int, wanted: tuple[int, int]) -> None:
    assert (managed.buckets_of(rows), managed.rows_of(rows)) == wanted
    module = managed.module(rows, CPU)
    assert (module.buckets(), module.output_size()) == wanted


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"eviction": "fifo"}, "managed.eviction: got 'fifo'; expected one of none, lru, lfu"),
        ({"admission_threshold": 0}, "managed.admission_threshold: got 0; expected at least 1"),
        ({"buckets": -1}, "managed.buckets: got -1; expected at least 0"),
    ],
)
def test_settings_of_managed_ids_that_do_not_fit_are_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ManagedIds(**setting)


def test_only_tables_with_managed_ids_map_them() -> None:
    model = DLRMConfig(embedding_dim=4, managed=ManagedIds(buckets=2)).build(_dataset([1, 2]), CPU)
    assert isinstance(model, DLRM)
    bags = model.sparse_arch.embedding_bag_collection
    assert isinstance(bags, ManagedCollisionEmbeddingBagCollection)
    assert list(bags.managed_collision_collection.modules_by_table) == ["people"]
    assert [(t.name, t.num_embeddings) for t in bags.embedding_module.embedding_bag_configs()] == [
        ("people", 40),
        ("item", 7),
    ]
    assert type(bags.embedding_module).__name__ == "EmbeddingBagCollection"


@pytest.mark.parametrize("config", [MLPConfig(embedding_dim=4), LinearConfig()])
def test_ids_that_training_has_not_seen_share_the_row_of_their_bucket_and_change_nothing(config: Any) -> None:
    config = type(config)(**{**vars(config), "managed": ManagedIds(buckets=1)})
    seen, unseen = [10**12 + i for i in range(5)], [-7, 99, 10**15]
    model = config.build(_dataset(seen), CPU)
    with torch.no_grad():
        model.embedding_bag_collection.embedding_module.embedding_bags["people"].weight.normal_()
    model.train()
    (batch,) = _dataset(seen).train(5)
    model(batch.dense_features, batch.sparse_features)
    before = copy.deepcopy(model.state_dict())
    found = predict(model, _dataset([*unseen, *seen]).train(20), CPU).probabilities
    assert model.training
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    bags = model.embedding_bag_collection
    rows = {bags.inspect("user", id_).row for id_ in _ids(seen)}
    places = [bags.inspect("user", id_) for id_ in _ids(unseen)]
    assert len(rows) == 5
    assert None not in rows
    assert {place.row for place in places} == {None}
    assert len({place.shared_row for place in places} - rows) == 1  # one bucket has one row for them
    # Items differ from row to row, so compare the same item: sample 0 again with another unseen id.
    first, second = (predict(model, _dataset([id_]).train(1), CPU).probabilities for id_ in unseen[:2])
    assert torch.equal(first, second)
    assert found.shape == (8,)


def test_a_full_table_evicts_or_shares_as_set() -> None:
    for eviction, kept in (("lru", False), ("none", True)):
        config = MLPConfig(managed=ManagedIds(eviction=eviction, buckets=1))  # type: ignore[arg-type]
        model = config.build(_dataset([1]), CPU).train()
        attach(model, SGD())
        for first in range(0, 200, 2):
            (batch,) = _dataset([first]).train(1)
            model(batch.dense_features, batch.sparse_features)
        stats = model.embedding_bag_collection.stats()["people"]  # type: ignore[operator, union-attr]
        assert (stats.features["user"].evictions == 0) == kept
        place = model.embedding_bag_collection.inspect("user", _ids([0])[0])  # type: ignore[operator, union-attr]
        assert (place.row is not None) == kept


def test_an_id_gets_its_row_at_its_kth_occurrence() -> None:
    model = MLPConfig(managed=ManagedIds(admission_threshold=3)).build(_dataset([1]), CPU).train()
    (id_,) = _ids([1])
    live = []
    for _ in range(4):
        (batch,) = _dataset([1]).train(1)
        model(batch.dense_features, batch.sparse_features)
        live.append(model.embedding_bag_collection.inspect("user", id_).row is not None)  # type: ignore[operator, union-attr]
    assert live == [False, True, True, True]  # two of its occurrences are in each sample: as user and as friend


def test_logistic_regression_begins_at_zero() -> None:
    dataset = _dataset([1, 2, 3])
    (batch,) = dataset.train(3)
    assert not LinearConfig().build(dataset, CPU)(batch.dense_features, batch.sparse_features).any()


class Mixed(TableDataset):
    """A dataset whose features disagree about their table."""

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        return (SparseFeature("user", 40, table="people", managed=True), SparseFeature("item", 40, table="people"))


def test_features_of_one_table_must_agree() -> None:
    dataset = _dataset([1])
    mixed = Mixed(pa.table({"click": [1], "price": [1.0], "user": [1], "friends": [[1]], "closeness": [[1.0]],
                            "item": [1]}), COLUMNS)  # fmt: skip
    with pytest.raises(ConfigError, match=r"table 'people': got features with ids \{'user': 'managed', 'item': 'rows'"):
        MLPConfig().build(mixed, CPU)
    assert dataset.sparse_features[0].managed


def test_models_that_need_ids_or_dense_features_refuse_other_data() -> None:
    bare = TableDataset(
        pa.table({"click": [0, 1], "price": [1.0, 2.0]}),
        Columns(labels=(LabelColumn("click"),), dense=(DenseColumn("price"),)),
    )
    with pytest.raises(ConfigError, match="DLRM: got a dataset without ids; expected at least one column"):
        DLRMConfig().build(bare, CPU)
    without = SyntheticData(num_rows=(5,), num_dense=0).open()
    with pytest.raises(ConfigError, match=r"without dense features; expected at least one\. Use kind = 'dcn' or 'mlp'"):
        DLRMConfig().build(without, CPU)
    assert LinearConfig().build(bare, CPU)(torch.ones(2, 1), None).tolist() == [[0.0], [0.0]]
