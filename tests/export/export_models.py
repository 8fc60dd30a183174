"""Small models for tests of exports, and their batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_processor import PositionWeightedModuleCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.quantized import quantize_tables
from tilerec.retrieval.item_index import ItemIndex
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig

ROWS, DIM, DENSE = 24, 4, 3
POOLED = ("user", "item")
MANAGED = ("raw",)


@dataclass(frozen=True)
class EveryBatch:
    dense: Tensor
    pooled: KeyedJaggedTensor
    managed: KeyedJaggedTensor

    def args(self) -> tuple[Tensor, KeyedJaggedTensor, KeyedJaggedTensor]:
        return self.dense, self.pooled, self.managed


def kjt(keys: tuple[str, ...], samples: int, generator: torch.Generator, rows: int = ROWS) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 3, (len(keys) * samples,), generator=generator, dtype=torch.int32)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(list(keys), values, lengths)


def every_batch(samples: int, seed: int = 0) -> EveryBatch:
    generator = torch.Generator().manual_seed(seed)
    return EveryBatch(
        torch.randn(samples, DENSE, generator=generator),
        kjt(POOLED, samples, generator),
        kjt(MANAGED, samples, generator, rows=1 << 40),
    )


class EveryKind(nn.Module):
    """Pooled, sequence, managed, position-weighted and quantized tables, a search of items, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.pooled = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(ROWS, DIM, "user", feature_names=["user"]),
                EmbeddingBagConfig(ROWS, DIM, "item", feature_names=["item"], pooling="mean", data_type="FP16"),
            ]
        )
        self.rows = EmbeddingCollection([EmbeddingConfig(ROWS, DIM, "seen", feature_names=["item"])])
        self.weighted = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "place", feature_names=["user"])], is_weighted=True),
            PositionWeightedModuleCollection({"user": 4}),
        )
        managed = [EmbeddingBagConfig(ROWS, DIM, "raw", feature_names=["raw"])]
        ids = HashZchManagedCollisionModule(zch_size=ROWS, total_num_buckets=4, disable_fallback=False)
        self.managed = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(managed), ManagedCollisionCollection({"raw": ids}, managed)
        )
        small = [EmbeddingBagConfig(ROWS, DIM + 1, key, feature_names=[key]) for key in POOLED]
        self.small = quantize_tables(EmbeddingBagCollection(small), "int8", per_table={"item": "int4"})
        read = EmbeddingCollection([EmbeddingConfig(ROWS, DIM, "read", feature_names=["user"])])
        self.read = quantize_tables(read, "int2")
        vectors = torch.randn(ROWS, 2 * DIM, generator=torch.Generator().manual_seed(2))
        self.index = ItemIndex.build(vectors, torch.arange(ROWS) + (1 << 40), form="ivf-int8", lists=4, nprobe=2)
        self.top = nn.Linear(DENSE + 4 * DIM, 2)

    def forward(self, dense: Tensor, pooled: KeyedJaggedTensor, managed: KeyedJaggedTensor) -> dict[str, Tensor]:
        own = self.pooled(pooled).values()
        weighted = self.weighted(pooled).values()
        raw, _ = self.managed(managed)
        seen = self.rows(pooled)["item"]
        score, best = self.index(own, 3)
        return {
            "logits": self.top(torch.cat([dense, own, weighted, raw.values()], dim=1)),
            "seen": seen.to_padded_dense(3).sum(1),
            "small": self.small(pooled).values(),
            "score": score,
            "best": best,
            "read": self.read(pooled)["user"].to_padded_dense(3).sum(1),
        }


def every_kind() -> EveryKind:
    """Return the model after two batches in training mode, so that ids have rows."""
    model = EveryKind().train()
    with torch.no_grad():
        for seed in (1, 2):
            model(*every_batch(5, seed).args())
    return model.eval()
