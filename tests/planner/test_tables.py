"""What a planner reads off a model."""

import torch
from torch import nn

from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.planner.tables import device_type_of, tables_of, tables_of_configs
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.plan import EmbeddingComputeKernel
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig


def bags(*configs: EmbeddingBagConfig) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(list(configs), device=torch.device("meta"))


def test_collections_are_found_at_any_depth_and_as_the_module_itself() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(2, 2), bags(EmbeddingBagConfig(10, 4, "x"))),
            "b": EmbeddingCollection([EmbeddingConfig(5, 3, "y")], device=torch.device("meta")),
        }
    )
    assert [table.names for table in tables_of(model)] == [(("a.1", "x"),), (("b", "y"),)]
    assert [table.names for table in tables_of(model["b"])] == [(("", "y"),)]
    assert tables_of(nn.Linear(2, 2)) == []


def test_optimizers_that_are_attached_are_known() -> None:
    module = bags(EmbeddingBagConfig(10, 4, "x"))
    assert tables_of(module)[0].optimizer is None
    apply_optimizer_in_backward(Adam(), list(module.parameters()))
    assert tables_of(module)[0].optimizer == Adam()
    frozen = bags(EmbeddingBagConfig(10, 4, "x"))
    frozen.requires_grad_(False)
    assert not tables_of(frozen, [EmbeddingBagCollectionSharder({"optimizer": "adam"})])[0].trained


def test_features_weights_and_pooling_are_those_of_the_collections() -> None:
    weighted = EmbeddingBagCollection(
        [EmbeddingBagConfig(10, 4, "x", feature_names=["f", "g"])],
        is_weighted=True,
        device=torch.device("meta"),
    )
    (table,) = tables_of(weighted)
    assert (table.features, table.weighted, table.pooled) == (("f", "g"), True, True)
    (sequence,) = tables_of(EmbeddingCollection([EmbeddingConfig(5, 3, "y")], device=torch.device("meta")))
    assert (sequence.features, sequence.weighted, sequence.pooled) == (("y",), False, False)


def test_keys_tell_tables_of_two_collections_apart() -> None:
    model = nn.ModuleDict({"a": bags(EmbeddingBagConfig(10, 4, "x")), "b": bags(EmbeddingBagConfig(10, 4, "x"))})
    assert [table.key for table in tables_of(model)] == ["a.x", "b.x"]
    assert [table.key for table in tables_of(model["a"])] == ["x"]


def test_configs_are_tables_of_one_collection() -> None:
    configs = [EmbeddingBagConfig(10, 4, "x", feature_names=["f"]), EmbeddingConfig(5, 3, "y")]
    sharders = [EmbeddingCollectionSharder({"optimizer": "adam"})]
    x, y = tables_of_configs(configs, sharders)
    assert (x.key, x.features, x.pooled, x.optimizer) == ("x", ("f",), True, None)
    assert (y.key, y.features, y.pooled, type(y.optimizer)) == ("y", ("y",), False, Adam)
    assert tables_of_configs(configs, sharders, {"y"})[1].optimizer is None


def test_the_kernel_says_whether_an_optimizer_is_attached() -> None:
    module = bags(EmbeddingBagConfig(10, 4, "x"), EmbeddingBagConfig(10, 4, "y"))
    apply_optimizer_in_backward(RowWiseAdagrad(), [module.embedding_bags["x"].weight])
    assert [table.kernel for table in tables_of(module)] == [
        EmbeddingComputeKernel.FUSED,
        None,
    ]
    sharder = EmbeddingBagCollectionSharder({"optimizer": "adam"})
    given = tables_of(module, [EmbeddingCollectionSharder({"optimizer": "sgd"}), sharder])
    assert [table.kernel for table in given] == [EmbeddingComputeKernel.FUSED] * 2
    assert isinstance(given[1].optimizer, Adam)
    kept = tables_of(module, [sharder], {"x", "y"})
    assert [table.kernel for table in kept] == [EmbeddingComputeKernel.FUSED, None]
    assert kept[1].optimizer is None


def test_a_table_that_collections_share_is_one() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "x", feature_names=["f"])])
    ec = EmbeddingCollection([EmbeddingConfig(10, 4, "z", feature_names=["g"])])
    ec.embeddings["z"] = ebc.embedding_bags["x"]
    model = nn.ModuleDict({"ebc": ebc, "ec": ec})
    assert [table.names for table in tables_of(model)] == [(("ebc", "x"), ("ec", "z"))]


def test_the_device_is_where_the_tables_are() -> None:
    assert device_type_of(EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "x")])) == "cpu"
    at_home = "cuda" if torch.cuda.is_available() else "cpu"
    assert device_type_of(bags(EmbeddingBagConfig(10, 4, "x"))) == at_home
