"""Exact search against sorting, on one rank and on two, with seen items, ties and unknown items."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilerec.comms.process import ProcessGroupComms
from tilerec.data.share import bounds
from tilerec.errors import TilerecError
from tilerec.retrieval.exact_search import ExactSearch, Nearest, Pairs
from tilerec.testing import run_ranks
from tilerec.train.world import World

QUERIES, ITEMS = 9, 23


def _case() -> tuple[Tensor, Tensor, Pairs, Pairs]:
    draw = torch.Generator().manual_seed(0)
    query = torch.randint(-2, 3, (QUERIES, 3), generator=draw).float()  # small integers: many ties
    vector = torch.randint(-2, 3, (ITEMS, 3), generator=draw).float()
    relevant = torch.rand(QUERIES, ITEMS, generator=draw) < 0.15
    seen = torch.rand(QUERIES, ITEMS, generator=draw) < 0.2
    seen[4] = True  # a query that has seen everything
    return query, vector, Pairs(*relevant.nonzero(as_tuple=True)), Pairs(*seen.nonzero(as_tuple=True))


def _order(query: Tensor, vector: Tensor, seen: Pairs) -> list[list[int]]:
    """Return the places of each query's items, best first; ties by place."""
    scores = query @ vector.t()
    hidden = set(zip(seen.query.tolist(), seen.place.tolist(), strict=True))
    return [
        sorted((i for i in range(len(vector)) if (q, i) not in hidden), key=lambda i: (-scores[q, i].item(), i))
        for q in range(len(query))
    ]


def _search(world: World, vector: Tensor, chunk: int) -> ExactSearch:
    low, high = bounds(len(vector), world.rank, world.size)
    return ExactSearch(vector[low:high], torch.arange(low, high), len(vector), world, chunk)


def _found(chunk: int, k: int, on_ranks: bool) -> tuple[Tensor, Nearest]:
    query, vector, relevant, seen = _case()
    search = _search(World(ProcessGroupComms() if on_ranks else None), vector, chunk)
    return search.ranks(query, relevant, seen), search.nearest(query, k, seen)


def _check(ranks: Tensor, nearest: Nearest, k: int) -> None:
    query, vector, relevant, seen = _case()
    order = _order(query, vector, seen)
    expected = [
        order[q].index(i) + 1 if i in order[q] else torch.inf
        for q, i in zip(relevant.query.tolist(), relevant.place.tolist(), strict=True)
    ]
    assert ranks.tolist() == expected
    for q in range(QUERIES):
        count = min(k, len(order[q]))
        scores = query[q] @ vector.t()
        assert nearest.score[q, :count].tolist() == [scores[i].item() for i in order[q][:count]]
        assert not nearest.score[q, count:].isfinite().any()
        found = nearest.place[q, :count].tolist()
        assert len(set(found)) == count
        assert found == order[q][:count]


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_ranks_and_neighbours_are_those_of_sorting(chunk: int, k: int) -> None:
    _check(*_found(chunk, k, False), min(k, ITEMS))


def test_ranks_hold_parts_of_the_items_and_find_the_same() -> None:
    for count in (2, 3):
        for ranks, nearest in run_ranks(count, _found, 60, 5, True):
            _check(ranks, nearest, 5)


def test_items_that_are_unknown_or_seen_are_misses() -> None:
    search = ExactSearch(torch.eye(3), torch.arange(3), 3, World(None))
    relevant = Pairs(torch.tensor([0, 0, 0]), torch.tensor([-1, 1, 2]))
    seen = Pairs(torch.tensor([0]), torch.tensor([1]))
    assert search.ranks(torch.tensor([[3.0, 2.0, 1.0]]), relevant, seen).tolist() == [torch.inf, torch.inf, 2]


def test_no_queries_and_one_item() -> None:
    none = Pairs(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    search = ExactSearch(torch.ones(1, 2), torch.arange(1), 1, World(None))
    assert search.ranks(torch.zeros(0, 2), none, none).tolist() == []
    assert search.nearest(torch.zeros(0, 2), 3, none).place.shape == (0, 1)
    assert search.nearest(torch.ones(2, 2), 3, none).place.tolist() == [[0], [0]]


def test_vectors_that_are_not_finite_are_refused() -> None:
    """A model with NaN scores has no item above the relevant one: it would look perfect."""
    none = Pairs(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    search = ExactSearch(torch.full((2, 2), torch.nan), torch.arange(2), 2, World(None))
    with pytest.raises(TilerecError, match=r"not finite.*lower learning rates"):
        search.ranks(torch.ones(1, 2), Pairs(torch.tensor([0]), torch.tensor([0])), none)


def _equal_scores(on_ranks: bool) -> list[int]:
    none = Pairs(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    vector = torch.zeros(100, 2)
    vector[7] = 1.0
    search = _search(World(ProcessGroupComms() if on_ranks else None), vector, 1 << 20)
    places: list[int] = search.nearest(torch.ones(1, 2), 10, none).place[0].tolist()
    return places


def test_equal_scores_at_the_cut_keep_the_order_of_the_places() -> None:
    expected = [7, 0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert _equal_scores(False) == expected
    assert run_ranks(2, _equal_scores, True) == [expected, expected]
