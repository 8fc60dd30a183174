"""What a planner reads off a model."""

import torch
from torch import nn

from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tilerec.planner.tables import device_type_of, tables_of
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.plan import EmbeddingComputeKernel
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig


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


def test_bytes_are_weights_with_gradients_or_optimizer_state() -> None:
    def bytes_with(spec: object, data_type: DataType = DataType.FP32) -> int:
        module = bags(EmbeddingBagConfig(10, 4, "x", data_type=data_type))
        if spec is not None:
            apply_optimizer_in_backward(spec, list(module.parameters()))
        return tables_of(module)[0].bytes

    assert bytes_with(None) == 10 * 4 * (4 + 4)
    assert bytes_with(RowWiseAdagrad()) == 10 * (4 * 4 + 4)
    assert bytes_with(Adam()) == 10 * 4 * (4 + 4 + 4)
    assert bytes_with(Adam(), DataType.BF16) == 10 * 4 * (2 + 4 + 4)
    assert bytes_with(Adam(), DataType.FP64) == 10 * 4 * (8 + 8 + 8)
    frozen = bags(EmbeddingBagConfig(10, 4, "x"))
    frozen.requires_grad_(False)
    assert tables_of(frozen)[0].bytes == 10 * 4 * 4


def test_column_tiles_each_carry_the_state_of_their_rows() -> None:
    module = bags(EmbeddingBagConfig(10, 4, "x"))
    apply_optimizer_in_backward(RowWiseAdagrad(), list(module.parameters()))
    table = tables_of(module)[0]
    assert table.bytes_of(10, 2) == 10 * (2 * 4 + 4)
    assert table.bytes_of(0, 4) == 0


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
    assert given[1].bytes == 10 * 4 * (4 + 4 + 4)
    kept = tables_of(module, [sharder], {"x", "y"})
    assert [table.kernel for table in kept] == [EmbeddingComputeKernel.FUSED, None]
    assert kept[1].bytes == 10 * 4 * (4 + 4)


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
