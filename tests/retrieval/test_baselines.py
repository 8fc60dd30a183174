"""Baselines against naive definitions, on a log small enough to solve by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.retrieval.retrieval_data import next_item_run, retrieval_run, write_log
from tilerec.errors import ConfigError
from tilerec.retrieval import baselines
from tilerec.retrieval.baselines import baseline_scores, checked_baselines
from tilerec.retrieval.ranking_task import RankingTask
from tilerec.train.config import RunConfig
from tilerec.train.world import World


def _built(run: RunConfig) -> RankingTask:
    task = run.task.build(run.data.open(), run.train, torch.device("cpu"), World(None))
    assert isinstance(task, RankingTask)
    return task


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return retrieval_run(write_log(tmp_path_factory.mktemp("log") / "log.txt"))


def _naive(run: RunConfig, name: str) -> tuple[float, float]:
    """Return recall@3 and mrr by sorting each query's scores."""
    data = run.data.open()
    user, item = (one.numpy() for one in data.histories())  # type: ignore[attr-defined]
    items = data.sparse_features[1].num_rows
    matrix = np.zeros((user.max() + 1, items))
    matrix[user, item] = 1
    inverse = np.linalg.inv(matrix.T @ matrix + 100 * np.eye(items))
    ease = -inverse / np.diag(inverse)
    np.fill_diagonal(ease, 0)
    follows = np.zeros((items, items))
    for n in range(len(user) - 1):
        if user[n] == user[n + 1]:
            follows[item[n], item[n + 1]] += 1
    recalls, mrrs = [], []
    for batch in data.held_out(1):
        seen, history = batch.sparse_features["seen"].values().numpy(), batch.sparse_features["history"].values()
        if name == "popularity":
            scores = np.bincount(item, minlength=items).astype(np.float32)
        elif name == "EASE":
            scores = ease[np.unique(seen)].sum(0).astype(np.float32)
        else:
            scores = follows[history[-1]]
        scores = scores.copy()
        scores[seen] = -np.inf
        order = [i for i in np.argsort(-scores, kind="stable") if i and np.isfinite(scores[i])]
        ranks = [order.index(i) + 1 if i in order else np.inf for i in batch.sparse_features["item"].values().tolist()]
        recalls.append(np.mean([rank <= 3 for rank in ranks]))
        mrrs.append(1 / min(ranks))
    return float(np.mean(recalls)), float(np.mean(mrrs))


@pytest.mark.parametrize("name", ["popularity", "markov", "EASE"])
def test_baselines_have_the_scores_of_their_definitions(run: RunConfig, name: str) -> None:
    data = run.data.open()
    found = baseline_scores(_built(run), data, data.held_out(9))[name]  # type: ignore[arg-type]
    assert found.samples == 40
    expected = _naive(run, name)
    # EASE's sums in float32 may order two close items in another way.
    assert (found["recall@3"], found["mrr"]) == pytest.approx(expected, abs=2e-2 if name == "EASE" else 1e-9)


def test_transitions_find_the_pattern_of_the_log(tmp_path: Path) -> None:
    run = next_item_run(write_log(tmp_path / "log.txt"))
    data = run.data.open()
    found = baseline_scores(_built(run), data, data.held_out(9))  # type: ignore[arg-type]
    assert found["markov"]["recall@3"] > 0.6
    assert found["popularity"]["recall@3"] < 0.4


def test_large_catalogs_and_other_runs_are_refused(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    data = run.data.open()
    with pytest.raises(ConfigError, match="--baselines: got a run of another kind"):
        checked_baselines(_built(run), data, "other.txt", 9)
    monkeypatch.setattr(baselines, "MOST_ITEMS", 10)
    with pytest.raises(ConfigError, match=r"got 24 items; expected at most 10"):
        checked_baselines(_built(run), data, None, 9)
