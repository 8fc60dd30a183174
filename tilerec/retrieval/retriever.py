"""`Retriever`: a query tower and an item index as one module, for `torch.export` and for serving.

    features of queries  ->  query tower  ->  vectors [B, D]  ->  ItemIndex  ->  scores [B, k], raw ids [B, k]

Items and queries must be of one training state. An index keeps the hash of its query tower's weights, and a `Retriever`
raises an error for a tower with another hash.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.data.share import cut
from tilerec.errors import ConfigError, InputError
from tilerec.retrieval.item_index import Filters, IndexForm, ItemIndex
from tilerec.retrieval.item_index_file import check_tower
from tilerec.retrieval.ranking_task import eval_mode
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.train.saved_model import weights_hash


class Retriever(nn.Module):
    """A query tower followed by a search in an index.

    Args:
        tower: features of B samples to query vectors [B, D].
        index: items of the same training state.
        k: number of items per query.
        temperature: divides the query vectors; with that of the retrieval task, scores are those of training.

    Shape: the tower's input to (scores float32 [B, k], raw ids int64 [B, k]); see `ItemIndex.forward`.

    State: `tower.*`, `index.*`.

    Raises:
        ConfigError: the index has no hash, or that of another tower; the temperature is not above 0.
        InputError: k is out of range.

    `torch.export.export(retriever, (features,), dynamic_shapes=...)` makes one program of both.
    """

    def __init__(self, tower: nn.Module, index: ItemIndex, k: int, temperature: float = 1.0) -> None:
        super().__init__()
        check_tower(index, weights_hash(tower), "Retriever")
        if not 1 <= k <= len(index):
            raise InputError(
                f"Retriever: got k={k} with {len(index):,} items; expected 1 to {len(index):,}. Correct it."
            )
        if not 0 < temperature < math.inf:
            raise ConfigError(f"Retriever: got temperature={temperature}; expected a number above 0. Correct it.")
        self.tower, self.index, self.k, self.temperature = tower, index, k, temperature

    def forward(self, features: Any, filters: Filters | None = None) -> tuple[Tensor, Tensor]:
        """Return the k best items of each sample: scores and raw ids [B, k].

        Args:
            features: the tower's input: a `KeyedJaggedTensor`, or a tensor.
            filters: items to leave out.
        """
        found: tuple[Tensor, Tensor] = self.index(self.tower(features) / self.temperature, self.k, filters)
        return found


def index_of_items(
    item_tower: nn.Module, features: KeyedJaggedTensor, ids: Tensor, *, query_tower: nn.Module,
    form: IndexForm = "exact", batch_size: int = 8192, device: torch.device | str = "cpu", **options: Any,
) -> ItemIndex:  # fmt: skip
    """Return the index of a catalog of items.

    Args:
        item_tower: features of n items to [n, D]; called in eval mode. For a `TwoTower`: `Tower(model, "candidate")`.
        features: of N items, on the CPU. Tables of managed collision may remap their ids: the index has `ids`.
        ids: raw ids of the items, int64 [N].
        query_tower: the index keeps its hash. For a `TwoTower`: `Tower(model, "query")`.
        form, options: see `ItemIndex.build`.
        batch_size: items whose vectors are computed at a time.
        device: of the item tower.

    Raises:
        InputError, ConfigError: see `ItemIndex.build`.
    """
    if not features.stride():
        raise InputError("index_of_items: got features of no item; expected at least one. Check the catalog.")
    batch = Batch(torch.zeros(features.stride(), 0), features, torch.zeros(features.stride()))
    vectors = []
    with eval_mode(item_tower):
        for low in range(0, features.stride(), batch_size):
            part = cut(batch, low, min(low + batch_size, features.stride()))
            vectors.append(item_tower(part.sparse_features.to(torch.device(device))).float())
    return ItemIndex.build(torch.cat(vectors), ids, form=form, tower=weights_hash(query_tower), **options)
