from __future__ import annotations

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.models.dlrm import DLRM
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig, DotConfig
from tilerec.train.config import ModelConfig

CPU = torch.device("cpu")


def test_dlrm_has_a_table_per_feature_and_gives_a_logit_per_sample() -> None:
    data = SyntheticData(num_rows=(11, 7, 5), min_lengths=(0,), max_lengths=(3,)).open()
    model = DLRMConfig(embedding_dim=6, dense_arch=(9,), over_arch=(8,), mean_pooling=True).build(data, CPU)
    assert isinstance(model, DLRM)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if "embedding_bags" in name}
    assert sorted(shapes.values()) == [(5, 6), (7, 6), (11, 6)]
    batch = data.batch(0, 13)
    assert model(batch.dense_features, batch.sparse_features).shape == (13, 1)


@pytest.mark.parametrize("bound", [0.0, 0.25])
def test_initial_rows_lie_within_the_bound(bound: float) -> None:
    data = SyntheticData(num_rows=(100,)).open()
    model = DLRMConfig(embedding_dim=8, init_bound=bound).build(data, CPU)
    (table,) = [p for name, p in model.named_parameters() if "embedding_bags" in name]
    limit = bound or 100**-0.5
    assert 0.8 * limit < table.abs().max().item() <= limit


def test_dot_model_is_a_scaled_dot_product_and_an_mlp_of_both_vectors() -> None:
    data = SyntheticData(num_rows=(11, 7)).open()
    for layers in ((), (5,)):
        model = DotConfig(embedding_dim=4, layers=layers).build(data, CPU)
        batch = data.batch(0, 9)
        tables = [p for name, p in model.named_parameters() if "embedding_bags" in name]
        a, b = (table[batch.sparse_features[f"feature_{i}"].values()] for i, table in enumerate(tables))
        expected = (a * b).sum(1) / 2 + model.over_arch(torch.cat([a, b], 1)).squeeze(1)
        torch.testing.assert_close(model(batch.dense_features, batch.sparse_features), expected)


def test_datasets_that_do_not_fit_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="without dense features; expected at least one"):
        DLRMConfig().build(SyntheticData(num_rows=(5,), num_dense=0).open(), CPU)
    with pytest.raises(ConfigError, match=r"sparse features \[.*\]; expected two"):
        DotConfig().build(SyntheticData(num_rows=(5,)).open(), CPU)


@pytest.mark.parametrize(
    "config", [DLRMConfig(embedding_dim=4, dense_arch=(5,), over_arch=(6,)), DotConfig(embedding_dim=4)]
)
def test_tables_may_be_on_meta_and_the_dense_part_has_the_same_values(config: ModelConfig) -> None:
    data = SyntheticData(num_rows=(30, 20), num_dense=3).open()
    torch.manual_seed(5)
    real = dict(config.build(data, CPU).named_parameters())
    torch.manual_seed(5)
    apart = dict(config.build(data, CPU, torch.device("meta")).named_parameters())
    assert set(real) == set(apart)
    for name, parameter in apart.items():
        assert parameter.is_meta == ("_table" in name)
        assert parameter.is_meta or torch.equal(parameter, real[name])
