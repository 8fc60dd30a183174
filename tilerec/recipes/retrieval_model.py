"""Model configs of retrieval and next-item recipes.

Legend: D embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tilerec.data.columns import nearest
from tilerec.data.dataset import Dataset, SparseFeature
from tilerec.errors import ConfigError
from tilerec.models.sasrec import SASRec
from tilerec.models.two_tower import TwoTower
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.train.config import ModelConfig


@dataclass(frozen=True)
class TwoTowerConfig(ModelConfig):
    """`TwoTower`: a vector for the query and one for the item. Features of one table share its rows.

    Attributes:
        query_features, candidate_features: features of the query, and of the item: the id, and others.
        embedding_dim: D of every table.
        layers: sizes of each tower's MLP, the last one that of its vectors; [] for pooled vectors as they are.
        normalize: divide vectors by their norm, so scores are cosines; use a small task.temperature with it.
        mean_pooling: average bags instead of summing them; bags with weights are always summed.
        init_bound: initial rows are uniform in ±init_bound; 0 means ±sqrt(1 / rows of the table).
    """

    query_features: tuple[str, ...] = ("user",)
    candidate_features: tuple[str, ...] = ("item",)
    embedding_dim: int = 64
    layers: tuple[int, ...] = (64,)
    normalize: bool = False
    mean_pooling: bool = True
    init_bound: float = 0.0

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        wanted = [*self.query_features, *self.candidate_features]
        weighted = any(feature.weighted for feature in dataset.sparse_features)
        tables = [
            EmbeddingBagConfig(
                num_embeddings=rows,
                embedding_dim=self.embedding_dim,
                name=name,
                feature_names=features,
                pooling="MEAN" if self.mean_pooling and not weighted else "SUM",
                weight_init_min=-self.init_bound if self.init_bound else None,
                weight_init_max=self.init_bound if self.init_bound else None,
            )
            for name, (rows, features) in _tables(dataset, wanted, "TwoTower").items()
        ]
        return TwoTower(
            EmbeddingBagCollection(tables, is_weighted=weighted, device=table_device or device),
            self.layers,
            device,
            query_features=self.query_features,
            candidate_features=self.candidate_features,
            normalize=self.normalize,
        )


@dataclass(frozen=True)
class SASRecConfig(ModelConfig):
    """`SASRec`: causal self-attention over the items of a sequence.

    Attributes:
        sequence: feature with the items so far.
        item: feature with the next item; both features have one table.
        embedding_dim: D.
        max_length: longest sequence.
        num_blocks, num_heads: layers of attention, and heads of each.
        dropout: probability.
        init_bound: initial rows are uniform in ±init_bound; 0 means ±sqrt(6 / (rows + D)).
    """

    sequence: str = "history"
    item: str = "item"
    embedding_dim: int = 64
    max_length: int = 50
    num_blocks: int = 2
    num_heads: int = 1
    dropout: float = 0.2
    init_bound: float = 0.0

    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        tables = _tables(dataset, [self.sequence, self.item], "SASRec")
        longest = next(one.max_length for one in dataset.sparse_features if one.name == self.sequence)
        if longest > self.max_length:
            raise ConfigError(
                f"model.max_length: got {self.max_length} for sequences of up to {longest} items; expected at least "
                f"{longest}. Set the max_length of the data to {self.max_length}, or that of the model to {longest}."
            )
        configs = []
        for name, (rows, features) in tables.items():
            bound = self.init_bound or (6 / (rows + self.embedding_dim)) ** 0.5
            configs.append(
                EmbeddingConfig(
                    num_embeddings=rows,
                    embedding_dim=self.embedding_dim,
                    name=name,
                    feature_names=features,
                    weight_init_min=-bound,
                    weight_init_max=bound,
                )
            )
        return SASRec(
            EmbeddingCollection(configs, device=table_device or device),
            sequence=self.sequence,
            target=self.item,
            max_length=self.max_length,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            dropout=self.dropout,
            device=device,
        )


def _tables(dataset: Dataset, wanted: list[str], model: str) -> dict[str, tuple[int, list[str]]]:
    """Return rows and features of the tables of some features, in the order of the data."""
    known = {feature.name: feature for feature in dataset.sparse_features}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"{model}: got feature {name!r}, which the data do not have; {nearest(name, known)}")
        if known[name].managed:
            raise ConfigError(
                f"feature {name!r}: got a managed table; expected ids='hash' or 'rows' with {model}. Change the table."
            )
    found: dict[str, tuple[int, list[str]]] = {}
    for name in dict.fromkeys(wanted):
        feature: SparseFeature = known[name]
        rows, features = found.setdefault(feature.table or f"{name}_table", (feature.num_rows, []))
        if rows != feature.num_rows:
            raise ConfigError(
                f"table {feature.table!r}: got features with {rows} and {feature.num_rows} rows; expected one number. "
                "Give both one size."
            )
        features.append(name)
    return found
