"""TorchRec's configs can be changed before a module is built, and are checked as tilerec's."""

from __future__ import annotations

import copy
import operator
import pickle
from types import SimpleNamespace

import pytest
import torch

import tilerec
from tilerec.compat.configs import EmbeddingBagConfig, EmbeddingConfig, QuantConfig, pooling_type_to_str
from tilerec.compat.modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
from tilerec.compat.quant_modules import EmbeddingBagCollection as QuantEBC
from tilerec.compat.quant_modules import EmbeddingCollection as QuantEC
from tilerec.errors import ConfigError


def test_a_config_can_be_changed_until_a_module_is_built() -> None:
    config = EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["a"])
    config.embedding_dim = 8  # type: ignore[misc]
    config.pooling = "mean"  # type: ignore[misc]
    assert config.pooling is tilerec.PoolingType.MEAN
    assert config.feature_names == ["a"]
    assert operator.add(config.feature_names, ["b"]) == ["a", "b"]
    assert operator.add(["b"], config.feature_names) == ["b", "a"]
    with pytest.raises(ConfigError, match="got embedding_dim=0"):
        config.embedding_dim = 0  # type: ignore[misc]
    assert config.embedding_dim == 8
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    ebc = tilerec.EmbeddingBagCollection([config])
    assert ebc.embedding_bags["t"].weight.shape == (10, 8)
    assert isinstance(ebc, EmbeddingBagCollectionInterface)


def test_names_of_outputs_carry_the_table_if_a_feature_has_several() -> None:
    tables = [EmbeddingConfig(3, 4, "t", feature_names=["a", "b"]), EmbeddingConfig(3, 4, "u", feature_names=["b"])]
    assert get_embedding_names_by_table(tables) == [["a", "b@t"], ["b@u"]]
    assert pooling_type_to_str(pooling_type=tilerec.PoolingType.MEAN) == "mean"


def test_a_quantized_collection_follows_the_qconfig_of_the_module() -> None:
    types = SimpleNamespace(dtype=torch.qint8), SimpleNamespace(dtype=torch.float32)
    config = QuantConfig(activation=types[1], weight=lambda: types[0], per_table_weight_dtype={"u": torch.quint4x2})
    tables = [tilerec.EmbeddingBagConfig(10, 8, name, feature_names=[name]) for name in ("t", "u")]
    ebc = tilerec.EmbeddingBagCollection(tables)
    with pytest.raises(ConfigError, match="without qconfig"):
        QuantEBC.from_float(ebc)
    ebc.qconfig = config  # type: ignore[assignment]
    made = QuantEBC.from_float(ebc)
    assert isinstance(made, QuantEBC)
    assert not isinstance(ebc, QuantEBC)
    assert [own.bits for own in made.row_types().values()] == [8, 4]
    features = tilerec.KeyedJaggedTensor.from_lengths_sync(["t", "u"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    torch.testing.assert_close(made(features).values(), ebc(features).values(), rtol=0, atol=0.1)
    ec = tilerec.EmbeddingCollection([tilerec.EmbeddingConfig(10, 8, "t", feature_names=["t"])])
    ec.qconfig = config  # type: ignore[assignment]
    out = QuantEC.from_float(ec)(features)["t"].values()
    torch.testing.assert_close(out, ec(features)["t"].values(), rtol=0, atol=0.1)
