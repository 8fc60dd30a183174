"""Baselines of ranking tasks: popularity, EASE and item-to-item transitions, in closed form.

Each is a query vector and an item vector with an inner product, so they are ranked by the search of the models:

    popularity    score of i = interactions with i in the training part
    ease          score of i = sum of B_ji over the seen items j;  B = I - P / diag(P), P = (X'X + lambda I)^-1
                  X is the matrix of users and items of the training part, with ones (Steck, Embarrassingly shallow
                  autoencoders for sparse data, WWW 2019, 1905.03375)
    markov        score of i = how often i follows the last item in the training part

Memory of EASE and markov: two N x N matrices in float32.

Legend: U users, N items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.data.interactions import Interactions
from tilerec.errors import ConfigError
from tilerec.metrics.ranking import ranking_scores
from tilerec.retrieval.exact_search import ExactSearch, Pairs
from tilerec.retrieval.ranking_scores import RankingScores
from tilerec.retrieval.ranking_task import RankingTask
from tilerec.train.task import Task
from tilerec.train.world import World

MOST_ITEMS = 20_000
"""Items up to which the matrices of EASE and markov are computed; 20,000 need 3.2 GB."""
EASE_LAMBDA = 100.0

Queries = Callable[[Batch], Tensor]
"""Query vectors of samples."""


def baseline_scores(
    task: RankingTask, data: Interactions, batches: Iterable[Batch], *, ease_lambda: float = EASE_LAMBDA
) -> dict[str, RankingScores]:
    """Return the scores of the baselines on the samples of a task, by name. In one process.

    Args:
        task: its settings and its catalog; the ids of its items are 1, 2, ….
        data: the run's data.
        batches: held-out samples.
        ease_lambda: weight of the regularisation of EASE.

    Raises:
        ConfigError: more than 20,000 items.
    """
    items = data.sparse_features[1].num_rows
    if items - 1 > MOST_ITEMS:
        raise ConfigError(
            f"baselines: got {items - 1:,} items; expected at most {MOST_ITEMS:,}, because EASE inverts a matrix of "
            "that size. Leave the baselines out."
        )
    user_n, item_n = data.histories()
    found: dict[str, tuple[Queries, Tensor]] = {
        "popularity": (_ones, torch.bincount(item_n, minlength=items).float()[:, None]),
        "EASE": (lambda batch: _multi_hot(batch, "seen", items), _ease(user_n, item_n, items, ease_lambda).t()),
        "markov": (lambda batch: _last(batch, items), _transitions(user_n, item_n, items).t()),
    }
    held = list(batches)
    return {name: _scores(task, held, queries, vectors_ND[1:]) for name, (queries, vectors_ND) in found.items()}


def checked_baselines(task: Task, dataset: Dataset, data: str | None, batch_size: int) -> dict[str, RankingScores]:
    """Return `baseline_scores` on the held-out part of a run.

    Raises:
        ConfigError: the run, or the samples, are of another kind.
    """
    if not isinstance(task, RankingTask) or not isinstance(dataset, Interactions) or data is not None:
        raise ConfigError(
            "--baselines: got a run of another kind; expected data.kind = 'interactions' and a task that ranks "
            "items, on its held-out part. Leave the option out."
        )
    return baseline_scores(task, dataset, dataset.held_out(batch_size))


def _scores(task: RankingTask, batches: list[Batch], queries: Queries, vector_ND: Tensor) -> RankingScores:
    search = ExactSearch(vector_ND, torch.arange(vector_ND.shape[0]), vector_ND.shape[0], World(None))
    ranks, numbers, total = [torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)], 0
    for batch in batches:
        relevant: Pairs = task.relevant(batch)
        ranks.append(search.ranks(queries(batch), relevant, task.excluded(batch)))
        numbers.append(relevant.query + total)
        total += batch.batch_size
    query_R = torch.cat(numbers)
    return RankingScores(int(query_R.unique().numel()), ranking_scores(torch.cat(ranks), query_R, total, task.cutoffs))


def _ones(batch: Batch) -> Tensor:
    return torch.ones(batch.batch_size, 1)


def _multi_hot(batch: Batch, feature: str, items: int) -> Tensor:
    bags = batch.sparse_features[feature]
    sample = torch.repeat_interleave(torch.arange(batch.batch_size), bags.lengths().long())
    hot = torch.zeros(batch.batch_size, items)
    hot[sample, bags.values().long()] = 1.0
    return hot


def _last(batch: Batch, items: int) -> Tensor:
    bags = batch.sparse_features["history"]
    full = (bags.lengths() > 0).nonzero().squeeze(1)
    hot = torch.zeros(batch.batch_size, items)
    hot[full, bags.values()[bags.offsets()[1:][full].long() - 1].long()] = 1.0
    return hot


def _ease(user_n: Tensor, item_n: Tensor, items: int, weight: float) -> Tensor:
    """Return B [N, N]: row j has the contributions of a seen item j."""
    # Distinct pairs: X has ones.
    pairs = torch.unique(user_n * items + item_n)
    row, column = pairs // items, pairs % items
    gram = torch.zeros(items, items)
    for chunk in torch.arange(int(row[-1]) + 1 if len(row) else 0).split(1024):
        first, last = torch.searchsorted(row, torch.stack([chunk[0], chunk[-1] + 1])).tolist()
        part = torch.zeros(chunk.numel(), items)
        part[row[first:last] - chunk[0], column[first:last]] = 1.0
        gram.addmm_(part.t(), part)
    gram.diagonal().add_(weight)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    found = inverse / -inverse.diagonal()
    found.fill_diagonal_(0.0)
    return found


def _transitions(user_n: Tensor, item_n: Tensor, items: int) -> Tensor:
    """Return the number of times that item i follows item j directly, [N, N]."""
    same = user_n[1:] == user_n[:-1]
    found = torch.zeros(items * items)
    pair = item_n[:-1][same] * items + item_n[1:][same]
    return found.index_add_(0, pair, torch.ones(pair.numel())).view(items, items)
