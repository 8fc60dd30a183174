"""Ranking scores from the ranks of relevant items, exact.

A query has one or more relevant items. Their ranks among all items (1 is the best) define every score:

    recall@k    relevant items with a rank <= k, over all relevant ones; mean over queries. With one relevant item per
                query it is the hit rate HR@k
    ndcg@k      sum of 1 / log2(1 + rank) over ranks <= k, over the same sum for the ranks 1, 2, ...; mean
    mrr         1 / (lowest rank); mean

Worked example: one query with ranks 1 and 4 has recall@2 = 1 / 2, ndcg@2 = 1 / (1 + 1 / log2 3) = 0.613, mrr = 1.

Legend: Q queries, R relevant items of all queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def ranking_scores(rank_R: Tensor, query_R: Tensor, queries: int, ks: Sequence[int]) -> dict[str, float]:
    """Return recall@k and ndcg@k for each k, and mrr.

    Args:
        rank_R: rank of each relevant item, from 1; inf for items that cannot be ranked, which count as misses.
        query_R: number of its query, in [0, queries).
        queries: Q; queries without relevant items are left out of the means.
        ks: cut-offs.

    Returns:
        Scores by name, NaN without queries.
    """
    rank_R = rank_R.double()
    relevant_Q = torch.bincount(query_R, minlength=queries)
    counted = relevant_Q > 0
    total = int(counted.sum())

    def mean(value_Q: Tensor) -> float:
        return float(value_Q[counted].sum()) / total if total else math.nan

    def summed(value_R: Tensor) -> Tensor:
        return torch.zeros(queries, dtype=torch.float64).index_add_(0, query_R, value_R)

    longest = int(relevant_Q.max()) if queries else 0
    # The best possible sum for n relevant items, by n.
    ideal = torch.cat([torch.zeros(1), 1 / torch.log2(torch.arange(longest, dtype=torch.float64) + 2)]).cumsum(0)
    found: dict[str, float] = {}
    for k in ks:
        hit_R = (rank_R <= k).double()
        found[f"recall@{k}"] = mean(summed(hit_R) / relevant_Q.clamp(min=1))
        gain_R = torch.where(rank_R <= k, 1 / torch.log2(1 + rank_R), 0.0)
        found[f"ndcg@{k}"] = mean(summed(gain_R) / ideal[relevant_Q.clamp(max=k)].clamp(min=1e-30))
    best_Q = torch.full((queries,), torch.inf, dtype=torch.float64).scatter_reduce_(0, query_R, rank_R, "amin")
    found["mrr"] = mean(1 / best_Q)
    return found
