"""`ExactSearch`: ranks and nearest items by inner product over all items, in bounded memory.

Each rank holds the vectors of its part of the items. Queries are the same on every rank. For a chunk of queries each
rank computes the scores of its own items, and the ranks exchange scores of relevant items, counts of better items, or
their k best items. So the result is exact, and no rank holds the vectors of all items.

    rank of an item = 1 + items with a higher score + items with the same score and a lower place

Legend: Q queries, N items of all ranks, n of this one, D dim, R relevant items, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.errors import TilerecError
from tilerec.train.world import World

CHUNK_SCORES = 1 << 24
"""Scores that are in memory at a time: 64 MB in float32."""


class Pairs(NamedTuple):
    """Items of queries.

    Attributes:
        query: number of the query of each pair, ascending.
        place: place of the item among the N; -1 for an item that is not among them.
    """

    query: Tensor
    place: Tensor

    def between(self, low: int, high: int) -> Pairs:
        """Return the pairs of the queries [low, high), numbered from 0."""
        first, last = torch.searchsorted(self.query, torch.tensor([low, high])).tolist()
        return Pairs(self.query[first:last] - low, self.place[first:last])


class Nearest(NamedTuple):
    """The best items of queries, best first.

    Attributes:
        score: float32 [Q, k]; -inf where a query has fewer items.
        place: int64 [Q, k].
    """

    score: Tensor
    place: Tensor


class ExactSearch:
    """Search in the items of all ranks. Collective: all ranks make the same calls with the same queries.

    Args:
        vector_nD: vectors of this rank's items, on its device.
        place_n: their places among the N items, ascending, on the CPU.
        items: N.
        world: the ranks.
        chunk_scores: scores that are computed at a time.
    """

    def __init__(
        self, vector_nD: Tensor, place_n: Tensor, items: int, world: World, chunk_scores: int = CHUNK_SCORES
    ) -> None:
        self._vector_nD, self._world, self._items = vector_nD.float(), world, items
        self._place_n = place_n.to(vector_nD.device)
        # Place of each item here; -1 for items of other ranks.
        self._here_N = torch.full((items + 1,), -1, dtype=torch.int64)
        self._here_N[place_n] = torch.arange(place_n.numel())
        # All ranks need equally many chunks, so the size follows from the largest part.
        self._chunk = max(1, chunk_scores // max(1, -(-items // world.size)))

    def ranks(self, query_QD: Tensor, relevant: Pairs, excluded: Pairs) -> Tensor:
        """Return the rank of each relevant item, float64 [R]; inf for excluded or unknown items.

        Args:
            query_QD: the queries.
            relevant: items to rank.
            excluded: items that take no part.
        """
        out: list[Tensor] = [torch.zeros(0, dtype=torch.float64)]
        for low in range(0, query_QD.shape[0], self._chunk):
            high = min(low + self._chunk, query_QD.shape[0])
            wanted = relevant.between(low, high)
            score_qn = self._scores(query_QD[low:high], excluded.between(low, high))
            here_R = self._here_N[wanted.place]
            own = (here_R >= 0).nonzero().squeeze(1)
            score_R = torch.zeros(here_R.shape[0], dtype=torch.float32)
            score_R[own] = score_qn[wanted.query[own], here_R[own]].cpu()
            score_R = self._world.sum("scores of relevant items", score_R)
            count_R = self._better(score_qn, wanted, score_R)
            count_R = self._world.sum("items with higher scores", count_R).double()
            out.append(torch.where((wanted.place >= 0) & score_R.isfinite(), count_R + 1, torch.inf))
        return torch.cat(out)

    def nearest(self, query_QD: Tensor, k: int, excluded: Pairs) -> Nearest:
        """Return the k best items of each query; at most N.

        Args:
            query_QD: the queries.
            k: number of items.
            excluded: items that take no part.
        """
        k = min(k, self._items)
        scores, places = [torch.zeros(0, k)], [torch.zeros(0, k, dtype=torch.int64)]
        for low in range(0, query_QD.shape[0], self._chunk):
            high = min(low + self._chunk, query_QD.shape[0])
            score_qn = self._scores(query_QD[low:high], excluded.between(low, high))
            best, column = _topk(score_qn, min(k, score_qn.shape[1]))
            place = self._place_n[column]
            # Of equal size on every rank, so that parts of the ranks can be joined column by column.
            pad = (0, k - best.shape[1])
            best = torch.nn.functional.pad(best, pad, value=-torch.inf)
            place = torch.nn.functional.pad(place, pad, value=self._items)
            shape = (self._world.size, high - low, k)
            every = self._world.gathered("best scores", best.reshape(-1)).view(shape).transpose(0, 1).flatten(1)
            where = self._world.gathered("best items", place.reshape(-1)).view(shape).transpose(0, 1).flatten(1)
            # Equal scores in the order of the places: sort by place first, then by score.
            where, order = where.sort(dim=1)
            every, order = every.gather(1, order).sort(dim=1, descending=True, stable=True)
            scores.append(every[:, :k])
            places.append(where.gather(1, order)[:, :k])
        return Nearest(torch.cat(scores), torch.cat(places))

    def _scores(self, query_qD: Tensor, excluded: Pairs) -> Tensor:
        score_qn = query_qD.float() @ self._vector_nD.t()
        if not bool(score_qn.isfinite().all()):
            raise TilerecError(
                "Scores: got values that are not finite; expected numbers. The model has diverged: train it with "
                "lower learning rates."
            )
        here = self._here_N[excluded.place]
        own = here >= 0
        score_qn[excluded.query[own], here[own]] = -torch.inf
        return score_qn

    def _better(self, score_qn: Tensor, wanted: Pairs, score_R: Tensor) -> Tensor:
        """Return how many of this rank's items are in front of each relevant item, float64 [R]."""
        device = score_qn.device
        query_R, place_R, own_R = wanted.query.to(device), wanted.place.to(device), score_R.to(device)
        count_R = torch.zeros(score_R.shape[0], dtype=torch.float64)
        for low in range(0, score_R.shape[0], self._chunk):
            part = slice(low, low + self._chunk)
            row_rn, own_r = score_qn[query_R[part]], own_R[part, None]
            first_rn = (row_rn == own_r) & (self._place_n < place_R[part, None])
            count_R[part] = ((row_rn > own_r) | first_rn).sum(1).double().cpu()
        return count_R


def _topk(score_qn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best scores of each row and their columns [q, k]; of equal scores, those with the lowest columns."""
    best, column = score_qn.topk(k, dim=1)
    if not k:
        return best, column
    # `topk` keeps any of the scores that equal the last one. A sort is slow, so only such rows are sorted.
    tied = ((score_qn >= best[:, -1:]).sum(1) > k).nonzero().squeeze(1)
    for rows in tied.split(max(1, CHUNK_SCORES // (4 * score_qn.shape[1]))):
        every, order = score_qn[rows].sort(dim=1, descending=True, stable=True)
        best[rows], column[rows] = every[:, :k], order[:, :k]
    return best, column
