from __future__ import annotations

import pytest

from tilerec.errors import ConfigError
from tilerec.models.tables import common_dim, output_names
from tilerec.spec.table import EmbeddingBagConfig


def test_a_feature_of_several_tables_is_named_with_each() -> None:
    configs = [
        EmbeddingBagConfig(9, 4, "t1", feature_names=["a", "b"]),
        EmbeddingBagConfig(9, 4, "t2", feature_names=["b", "c"]),
    ]
    assert output_names(configs) == ["a", "b@t1", "b@t2", "c"]


def test_the_common_dim_is_that_of_every_table() -> None:
    assert common_dim("M", [EmbeddingBagConfig(9, 4, "t1"), EmbeddingBagConfig(8, 4, "t2")]) == 4
    with pytest.raises(ConfigError, match="M: table 't2' has embedding_dim 5 and table 't1' 4"):
        common_dim("M", [EmbeddingBagConfig(9, 4, "t1"), EmbeddingBagConfig(8, 5, "t2")])
