"""`RankingTask`: tasks whose models have a vector per query and a vector per item, and rank items by inner product.

A subclass defines the loss, the query vectors of a batch and the vectors of items. This module ranks all items of the
catalog exactly, for scores (`evaluate`), for predictions (`predict`) and for an index (`index_vectors`).

    user  rank  item  score        predictions: one row per query and item, best first
       7     1     e    3.1
       7     2     b    2.8

Legend: B samples, N items, n of them on this rank, D dim, R relevant items.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.data.dataset import Catalog, Dataset, RowDataset
from tilerec.data.share import bounds, cut
from tilerec.errors import ConfigError
from tilerec.metrics.ranking import ranking_scores
from tilerec.ops.runtime.readback import drain
from tilerec.retrieval.exact_search import ExactSearch, Pairs
from tilerec.retrieval.ranking_scores import RankingScores
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.train.config import TaskConfig
from tilerec.train.predictions import ROW_COLUMN
from tilerec.train.task import Evaluation, Task
from tilerec.train.world import World


@dataclass(frozen=True)
class RankingConfig(TaskConfig):
    """Settings of every task that ranks items.

    Attributes:
        item: feature with the id of the item.
        seen: feature with the items that a query has seen; "": none.
        filter_seen: leave seen items out of scores and predictions. A relevant item that has been seen is then a miss.
        cutoffs: k of the scores recall@k and ndcg@k.
        top_k: items per query in files of predictions.
    """

    item: str = "item"
    seen: str = ""
    filter_seen: bool = True
    cutoffs: tuple[int, ...] = (10,)
    top_k: int = 10

    def __post_init__(self) -> None:
        if not self.cutoffs or min(self.cutoffs) < 1:
            raise ConfigError(f"task.cutoffs: got {list(self.cutoffs)}; expected numbers of at least 1. Correct them.")
        if self.top_k < 1:
            raise ConfigError(f"task.top_k: got {self.top_k}; expected at least 1. Set it higher.")


class IndexVectors(NamedTuple):
    """Vectors of all items, on rank 0.

    Attributes:
        vectors: float32 [N, D], on the CPU; empty on other ranks.
        catalog: the items, in the same order.
    """

    vectors: Tensor
    catalog: Catalog


class RankingTask(Task):
    """Base of tasks that rank the items of a catalog.

    Args:
        config: settings.
        dataset: the run's data, for its catalog.
        item_features: features of an item besides `config.item`.
        batch_size: items whose vectors are computed at a time, over all ranks.
        device: of the model.
        world: the ranks.
    """

    _name: str
    """Name of the task in reports."""

    def __init__(
        self,
        config: RankingConfig,
        dataset: Dataset,
        item_features: Sequence[str],
        batch_size: int,
        device: torch.device,
        world: World,
    ) -> None:
        self._settings, self._device, self._world, self._batch_size = config, device, world, batch_size
        known = {feature.name: feature for feature in dataset.sparse_features}
        for role, name in (("item", config.item), ("seen", config.seen)):
            if name and name not in known:
                raise ConfigError(
                    f"task.{role}: got {name!r}; expected a feature of the data: {', '.join(known)}. Correct the name."
                )
        if known[config.item].managed:
            raise ConfigError(
                f"feature {config.item!r}: got a managed table; expected ids='hash' or 'rows' for a task that ranks "
                "items, because an evicted item has no row. Change the table."
            )
        self._features = [feature.name for feature in dataset.sparse_features]
        self._weighted = any(feature.weighted for feature in dataset.sparse_features)
        self.item_rows = known[config.item].num_rows
        self.catalog = dataset.catalog(config.item, [name for name in item_features if name != config.item])
        if not len(self.catalog):
            raise ConfigError("task: got data without items; expected at least one. Check the data.")
        # Of items that share a row, scores use the first one.
        distinct, first = np.unique(self.catalog.ids.numpy(), return_index=True)
        self.item_ids = torch.from_numpy(distinct)
        self._first_of_row = torch.from_numpy(first)

    @abstractmethod
    def query_vectors(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the query vectors of samples [B, D], without gradients. Collective."""

    @abstractmethod
    def item_vectors(self, model: nn.Module, features: KeyedJaggedTensor) -> Tensor:
        """Return the vectors of items [B, D], without gradients. Collective.

        Args:
            features: all features of the data, empty but for those of the items.
        """

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """k of the scores."""
        return self._settings.cutoffs

    def relevant(self, batch: Batch) -> Pairs:
        """Return the relevant items of samples, each once; unknown items are misses, and all stay."""
        query_R, place_R = self._pairs(batch, self._settings.item)
        # An item that occurs twice has one rank; counted twice, it would raise ndcg@k above 1.
        order_R = torch.argsort(query_R * (len(self.catalog) + 1) + place_R, stable=True)
        query_R, place_R = query_R[order_R], place_R[order_R]
        again_R = torch.zeros(query_R.numel(), dtype=torch.bool)
        again_R[1:] = (query_R[1:] == query_R[:-1]) & (place_R[1:] == place_R[:-1]) & (place_R[1:] >= 0)
        return Pairs(query_R[~again_R], place_R[~again_R])

    # -- scores and predictions -----------------------------------------------------------------------------------

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
        """Return exact scores over all items; samples with a label above 0 are queries."""
        ranks, queries, total = [torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)], 0
        with eval_mode(model):
            search = self._search(model, distinct=True)
            for batch in batches:
                batch = self._positives(batch)
                relevant = self.relevant(batch)
                ranks.append(search.ranks(self._queries(model, batch), relevant, self.excluded(batch)))
                queries.append(relevant.query + total)
                total += batch.batch_size
            drain(self._device)
        query_R = torch.cat(queries)
        values = ranking_scores(torch.cat(ranks), query_R, total, self._settings.cutoffs)
        return Evaluation({self._name: RankingScores(int(query_R.unique().numel()), values)})

    def prediction_columns(self) -> Sequence[str]:
        return ["rank", "item", "score"]

    def predict(
        self, model: nn.Module, dataset: RowDataset, keys: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield for each batch the `top_k` best items of each sample, best first."""
        first = 0
        with eval_mode(model):
            search = self._search(model, distinct=False)
            for batch, table in dataset.rows(batch_size, keys):
                excluded = self.excluded(batch, distinct=False)
                score_Bk, place_Bk = search.nearest(self._queries(model, batch), self._settings.top_k, excluded)
                table = _with_row_numbers(table, first, batch.batch_size)
                yield batch.batch_size, self._best_items(table, score_Bk, place_Bk)
                first += batch.batch_size

    def index_vectors(self, model: nn.Module) -> IndexVectors:
        """Return the vectors of all items on rank 0. Collective."""
        with eval_mode(model):
            vector_nD, place_n = self._own_vectors(model, torch.arange(len(self.catalog)))
            flat = self._world.gathered("vectors", vector_nD.reshape(-1))
            place_N = self._world.gathered("items", place_n)
        if self._world.rank:
            return IndexVectors(torch.zeros(0, vector_nD.shape[1]), self.catalog)
        vector_ND = torch.empty(len(self.catalog), vector_nD.shape[1])
        vector_ND[place_N] = flat.view(-1, vector_nD.shape[1])
        return IndexVectors(vector_ND, self.catalog)

    def query_tables(
        self, model: nn.Module, dataset: RowDataset, keys: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield for each batch the number of samples, and their keys with a column `vector`. Collective."""
        first = 0
        with eval_mode(model):
            for batch, table in dataset.rows(batch_size, keys):
                query_BD = self._queries(model, batch).cpu()
                table = _with_row_numbers(table, first, batch.batch_size)
                flat = pa.array(query_BD.reshape(-1).numpy())
                vectors = pa.FixedSizeListArray.from_arrays(flat, query_BD.shape[1])
                yield batch.batch_size, table.append_column("vector", vectors)
                first += batch.batch_size

    # -- parts -------------------------------------------------------------------------------------------------------

    def _search(self, model: nn.Module, *, distinct: bool) -> ExactSearch:
        """Return a search in all items, or in one item for each distinct row."""
        wanted = self._first_of_row if distinct else torch.arange(len(self.catalog))
        vector_nD, place_n = self._own_vectors(model, wanted)
        return ExactSearch(vector_nD, place_n, wanted.numel(), self._world)

    def _own_vectors(self, model: nn.Module, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's vectors [n, D] of the wanted items, and their places among them [n]."""
        vectors, places = [], []
        items = self.catalog.batch()
        for low in range(0, wanted.numel(), self._batch_size):
            high = min(low + self._batch_size, wanted.numel())
            first, last = bounds(high - low, self._world.rank, self._world.size)
            place = torch.arange(low + first, low + last)
            selected = _select(items, wanted[place]).sparse_features
            own = with_all_keys(selected, self._features, weighted=self._weighted)
            vectors.append(self.item_vectors(model, own.to(self._device)))
            places.append(place)
        return torch.cat(vectors).float(), torch.cat(places)

    def _queries(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the query vectors of a batch that all ranks have, on every rank [B, D]."""
        low, high = bounds(batch.batch_size, self._world.rank, self._world.size)
        own_bD = self.query_vectors(model, cut(batch, low, high).to(self._device)).float()
        gathered = self._world.gathered("queries", own_bD.reshape(-1))
        return gathered.view(batch.batch_size, own_bD.shape[1]).to(self._device)

    def _positives(self, batch: Batch) -> Batch:
        """Return the samples with a label above 0."""
        positive = first_labels(batch) > 0
        return batch if bool(positive.all()) else _select(batch, positive.nonzero().squeeze(1))

    def _pairs(self, batch: Batch, feature: str, *, distinct: bool = True) -> Pairs:
        """Return the items of a feature by sample, with their places in the search."""
        bags = batch.sparse_features[feature]
        query = torch.repeat_interleave(torch.arange(batch.batch_size), bags.lengths().long())
        ids = bags.values().long()
        rows = self.item_ids if distinct else self.catalog.ids
        if distinct or bool((rows[1:] > rows[:-1]).all()):
            place = torch.searchsorted(rows, ids).clamp(max=rows.numel() - 1)
            return Pairs(query, torch.where(rows[place] == ids, place, -1))
        # Items share rows: every item with the row of an id counts.
        sorted_rows, order = rows.sort(stable=True)
        low, high = torch.searchsorted(sorted_rows, ids), torch.searchsorted(sorted_rows, ids, right=True)
        counts = high - low
        begin = torch.repeat_interleave(low - (counts.cumsum(0) - counts), counts)
        return Pairs(torch.repeat_interleave(query, counts), order[begin + torch.arange(int(counts.sum()))])

    def excluded(self, batch: Batch, *, distinct: bool = True) -> Pairs:
        """Return the seen items of samples, if the settings leave them out."""
        if not (self._settings.seen and self._settings.filter_seen):
            return Pairs(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        return self._pairs(batch, self._settings.seen, distinct=distinct)

    def _best_items(self, keys: pa.Table, score_Bk: Tensor, place_Bk: Tensor) -> pa.Table:
        has_Bk = score_Bk.isfinite()
        query, column = has_Bk.nonzero(as_tuple=True)
        table = keys.take(pa.array(query.numpy()))
        table = table.append_column("rank", pa.array((column + 1).numpy(), pa.int32()))
        table = table.append_column("item", self.catalog.values.take(pa.array(place_Bk[has_Bk].numpy())))
        return table.append_column("score", pa.array(score_Bk[has_Bk].numpy()))


def _with_row_numbers(keys: pa.Table, first: int, rows: int) -> pa.Table:
    """Return the keys; without columns, the numbers of the rows."""
    return keys if keys.num_columns else pa.table({ROW_COLUMN: pa.array(range(first, first + rows), pa.int64())})


def first_labels(batch: Batch) -> Tensor:
    """Return the labels of the first column, float32 [B]; 1 without labels."""
    if batch.labels.dim() == 1:
        return batch.labels.float()
    if not batch.labels.shape[1]:
        return torch.ones(batch.batch_size, device=batch.labels.device)
    return batch.labels[:, 0].float()


def sample_weights(batch: Batch) -> Tensor:
    """Return the weights of positives in the loss: label times weight, float32 [B]."""
    labels_B = first_labels(batch)
    return labels_B if batch.weights is None else labels_B * batch.weights.float()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode without gradients, and restore the mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def with_all_keys(features: KeyedJaggedTensor, keys: Sequence[str], *, weighted: bool = False) -> KeyedJaggedTensor:
    """Return features with all these keys, those that were absent empty; if `weighted`, with weights of 1."""
    have, stride = features.keys(), features.stride()
    values, lengths = [], []
    for key in keys:
        bags = features[key] if key in have else None
        values.append(features.values()[:0] if bags is None else bags.values())
        lengths.append(torch.zeros(stride, dtype=torch.int64) if bags is None else bags.lengths().to(torch.int64))
    ids = torch.cat(values)
    weights = torch.ones(ids.numel()) if weighted else None
    return KeyedJaggedTensor(list(keys), ids, weights, lengths=torch.cat(lengths), stride=stride)


def _select(batch: Batch, rows: Tensor) -> Batch:
    """Return some samples of a batch on the CPU, in the order of `rows`."""
    features = batch.sparse_features
    stride = features.stride()
    lengths_FB = features.lengths().view(-1, stride).to(torch.int64)
    starts_FB = features.offsets()[:-1].view(-1, stride)[:, rows].reshape(-1).to(torch.int64)
    counts = lengths_FB[:, rows].reshape(-1)
    begin = torch.repeat_interleave(starts_FB - (counts.cumsum(0) - counts), counts)
    place = begin + torch.arange(int(counts.sum()))
    weights = features.weights_or_none()
    return Batch(
        batch.dense_features[rows],
        KeyedJaggedTensor(
            features.keys(),
            features.values()[place],
            None if weights is None else weights[place],
            counts,
            stride=rows.numel(),
        ),
        batch.labels[rows],
        None if batch.weights is None else batch.weights[rows],
    )
