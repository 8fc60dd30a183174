"""Sharders of modules with managed collision speak of the tables inside of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.sharding.managed_models import build
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ManagedCollisionCollectionSharder,
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
    ModuleSharder,
    shard,
)
from tilerec.planner.helpers import row_wise
from tilerec.planner.sharder import sharder_of
from tilerec.spec.optimizer import SGD, Adam
from tilerec.spec.plan import Wire
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.virtual import run_virtual_ranks

Bags, Sequences = ManagedCollisionEmbeddingBagCollectionSharder, ManagedCollisionEmbeddingCollectionSharder


class Both(nn.Module):
    """Managed tables beside plain ones; none has an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = build("lru and lfu, shared rows")
        for table in self.ids.embedding_module._tables.values():
            table.rows.spec = table.rows.group = None
            table.rows.takes_gradients = False
        self.plain = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "other", feature_names=["o"])])


def optimizers(sharders: list[Any]) -> dict[str, Any]:
    def fn(group: Group) -> dict[str, Any]:
        model = Both()
        shard(model, row_wise(), group, sharder=sharders)
        tables = {**model.ids.embedding_module._tables, **model.plain._tables}
        wire = {
            name: s.wire for part in model.plan.plan.values() for name, s in part.items()
        }  # what each table's messages are
        return {name: (table.rows.spec, wire[name]) for name, table in tables.items()}

    return run_virtual_ranks(2, fn)[0]


def test_a_sharder_of_the_managed_kind_goes_before_one_of_all() -> None:
    narrow = Wire("bf16", "bf16")
    own = Bags(EmbeddingBagCollectionSharder({"optimizer": "sgd", "learning_rate": 0.5}, narrow))
    rest = EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": 0.25})
    for sharders in ([own, rest], [rest, own]):
        made = optimizers(sharders)
        assert made == {
            "user": (SGD(lr=0.5), narrow),
            "item": (SGD(lr=0.5), narrow),
            "plain": (SGD(lr=0.5), narrow),
            "other": (Adam(lr=0.25), Wire()),
        }


def test_without_one_the_sharder_of_bags_speaks_of_all_tables() -> None:
    made = optimizers([EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": 0.25})])
    assert {spec for spec, _ in made.values()} == {Adam(lr=0.25)}


def test_it_says_the_same_with_and_without_a_sharder_inside() -> None:
    params = {"optimizer": "sgd", "learning_rate": 0.5}
    for one, two in (
        (Bags(EmbeddingBagCollectionSharder(params)), Bags(fused_params=params)),
        (Sequences(EmbeddingCollectionSharder(params)), Sequences(None, None, params)),
    ):
        assert one.optimizer == two.optimizer == SGD(lr=0.5)
        assert one.fused_params == two.fused_params == params
        assert Bags(None, ManagedCollisionCollectionSharder()).optimizer is None


def test_it_names_the_parameters_of_its_modules_only() -> None:
    module = build("lru and lfu, shared rows")
    assert sharder_of(module.embedding_module, [Sequences(), Bags()]).module_type is type(module)
    assert list(Bags().shardable_parameters(module)) == ["user", "item", "plain"]
    for sharder, wrong in ((Bags(), module.embedding_module), (Sequences(), module)):
        with pytest.raises(ConfigError, match="expected a ManagedCollisionEmbedding"):
            sharder.shardable_parameters(wrong)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ebc_sharder": EmbeddingCollectionSharder()}, "ebc_sharder: got a EmbeddingCollectionSharder"),
        (
            {"ebc_sharder": EmbeddingBagCollectionSharder},
            "ebc_sharder: got the class EmbeddingBagCollectionSharder",
        ),
        ({"mc_sharder": EmbeddingBagCollectionSharder()}, "mc_sharder: got a EmbeddingBagCollectionSharder"),
        (
            {"ebc_sharder": EmbeddingBagCollectionSharder(), "fused_params": {"learning_rate": 1.0}},
            "got fused_params or qcomm_codecs_registry beside ebc_sharder",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Bags(**arguments)


def test_formats_for_ids_are_without_effect_and_named() -> None:
    with pytest.warns(UserWarning, match="qcomm_codecs_registry"):
        sharder = ManagedCollisionCollectionSharder(Wire("bf16", "bf16"))
    assert (sharder.qcomm_codecs_registry, sharder.wire) == (Wire("bf16", "bf16"), None)


def test_the_sharder_of_ids_is_a_module_sharder_without_parameters() -> None:
    sharder = ManagedCollisionCollectionSharder()
    assert isinstance(sharder, ModuleSharder)
    ids = Both().ids.managed_collision_collection
    assert isinstance(ids, sharder.module_type)
    assert issubclass(sharder.sharded_module_type, sharder.module_type)
    assert (sharder.shardable_parameters(ids), sharder.optimizer) == ({}, None)
    with pytest.raises(ConfigError, match="expected a ManagedCollisionCollection"):
        sharder.shardable_parameters(Both())
    given = optimizers([sharder, Bags(fused_params={"optimizer": "sgd", "learning_rate": 0.5})])
    assert given["other"][0] is None
