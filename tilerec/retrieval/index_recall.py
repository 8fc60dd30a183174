"""Recall of an `ItemIndex`: the share of the best items that it finds, beside the share of rows that it reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.retrieval.item_index import ItemIndex

MOST_QUERIES = 1_000
_K = 100
_SCORES = 1 << 24
"""Scores of exact search in memory at a time."""


class IndexRecall(NamedTuple):
    """What a search finds.

    Attributes:
        k: results of a query: 100, or all items if there are fewer.
        recall: mean share of the k best items by exact search among the k results.
        rows: mean share of the index's rows that a query reads.
        queries: number of queries.
    """

    k: int
    recall: float
    rows: float
    queries: int


@torch.no_grad()
def index_recall(index: ItemIndex, vectors_ND: Tensor, ids_N: Tensor, query_QD: Tensor) -> IndexRecall:
    """Measure the recall of an index.

    Args:
        vectors_ND, ids_N: the items of the index, with float vectors.
        query_QD: float vectors of queries, at least one.
    """
    k = min(_K, len(index))
    found, rows, step = 0, 0, max(1, _SCORES // max(1, vectors_ND.shape[0]))
    for query_qD in query_QD.float().split(step):
        best_qk = ids_N[torch.topk(query_qD @ vectors_ND.float().T, k).indices]
        own_qk = index(query_qD, k)[1]
        found += int((own_qk[:, :, None] == best_qk[:, None, :]).any(2).sum())
        rows += int(index.used[index.probed(query_qD)].sum())
    queries = query_QD.shape[0]
    return IndexRecall(k, found / (queries * k), rows / (queries * len(index)), queries)
