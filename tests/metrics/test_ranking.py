"""Ranking scores against a naive loop and torchmetrics."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tilerec.metrics.ranking import ranking_scores


def _naive(by_query: list[list[float]], k: int) -> tuple[float, float, float]:
    recalls, ndcgs, mrrs = [], [], []
    for ranks in by_query:
        if not ranks:
            continue
        recalls.append(sum(rank <= k for rank in ranks) / len(ranks))
        gain = sum(1 / math.log2(1 + rank) for rank in ranks if rank <= k)
        ndcgs.append(gain / sum(1 / math.log2(2 + place) for place in range(min(len(ranks), k))))
        mrrs.append(1 / min(ranks))
    return tuple(sum(values) / len(values) for values in (recalls, ndcgs, mrrs))  # type: ignore[return-value]


@pytest.mark.parametrize("k", [1, 3, 50])
def test_scores_are_those_of_a_loop(k: int) -> None:
    draw = random.Random(k)
    by_query = [draw.sample([1, 2, 3, 4, 5, 8, 20, math.inf], draw.randint(0, 5)) for _ in range(30)]
    rank = torch.tensor([one for ranks in by_query for one in ranks])
    query = torch.tensor([q for q, ranks in enumerate(by_query) for _ in ranks])
    found = ranking_scores(rank, query, len(by_query), [k])
    assert tuple(found.values()) == pytest.approx(_naive(by_query, k))
    assert list(found) == [f"recall@{k}", f"ndcg@{k}", "mrr"]


def test_scores_are_those_of_torchmetrics() -> None:
    from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall

    items, queries = 12, 8
    scores = torch.randn(queries, items)
    relevant = torch.rand(queries, items) < 0.3
    relevant[:, 0] = True
    order = scores.argsort(dim=1, descending=True)
    rank_of = torch.empty_like(order).scatter_(1, order, torch.arange(1, items + 1).expand(queries, items))
    query, item = relevant.nonzero(as_tuple=True)
    found = ranking_scores(rank_of[query, item], query, queries, [5])
    indexes = torch.arange(queries)[:, None].expand(queries, items)
    for name, metric in (
        ("recall@5", RetrievalRecall(top_k=5)),
        ("ndcg@5", RetrievalNormalizedDCG(top_k=5)),
        ("mrr", RetrievalMRR()),
    ):
        assert found[name] == pytest.approx(metric(scores, relevant.long(), indexes=indexes).item(), abs=1e-6)


def test_without_queries_scores_are_undefined() -> None:
    none = torch.zeros(0)
    assert all(math.isnan(value) for value in ranking_scores(none, none.long(), 0, [10]).values())
    assert all(math.isnan(value) for value in ranking_scores(none, none.long(), 3, [10]).values())


def test_the_worked_example() -> None:
    found = ranking_scores(torch.tensor([1, 4]), torch.tensor([0, 0]), 1, [2])
    assert found == pytest.approx({"recall@2": 0.5, "ndcg@2": 1 / (1 + 1 / math.log2(3)), "mrr": 1.0})
