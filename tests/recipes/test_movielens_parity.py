"""The recipe's model through the library equals the same model in plain torch, on generated ratings."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch

from tilerec.recipes.registry import make_run
from tilerec.train.override import override_all


def _benchmark() -> object:
    path = Path(__file__).parents[2] / "benchmarks" / "movielens_parity.py"
    spec = importlib.util.spec_from_file_location("movielens_parity", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["movielens_parity"] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    """Users and movies of two tastes, with noise."""
    draw = random.Random(1)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(1, 41):
        for movie in draw.sample(range(1, 61), 40):
            liked = (user % 2 == movie % 2) ^ (draw.random() < 0.15)
            lines.append(
                f"{user},{movie},{draw.choice([4, 4.5, 5] if liked else [1, 2.5, 3.5])},{draw.randrange(10**6)}"
            )
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_adagrad_through_the_library_equals_plain_torch(ratings: Path) -> None:
    benchmark = _benchmark()
    run = override_all(
        make_run("movielens", str(ratings)),
        ["train.batch_size=32", "train.epochs=4", "train.embedding_optimizer.lr=0.2"],
    )
    ours, plain = benchmark.compare(run)  # type: ignore[attr-defined]
    assert ours.scores.samples == 400
    assert ours.scores.auc == pytest.approx(plain.scores.auc, abs=1e-3)
    assert ours.scores.log_loss == pytest.approx(plain.scores.log_loss, abs=1e-3)
    assert ours.scores.auc > 0.7, "both learnt the tastes, so the comparison says something"


def test_the_comparison_refuses_runs_it_does_not_mirror(ratings: Path) -> None:
    benchmark = _benchmark()
    for setting in ("train.embedding_optimizer=SGD", "train.dense_optimizer.eps=0.1", "train.warmup_steps=5"):
        run = override_all(make_run("movielens", str(ratings)), [setting])
        with pytest.raises(SystemExit, match="This comparison"):
            benchmark.compare(run)  # type: ignore[attr-defined]


def test_plain_model_starts_from_the_same_values(ratings: Path) -> None:
    benchmark = _benchmark()
    run = make_run("movielens", str(ratings))
    dataset = run.data.open()
    model = run.model.build(dataset, torch.device("cpu"))
    plain = benchmark.PlainModel(model)  # type: ignore[attr-defined]
    batch = next(dataset.train(50))
    torch.testing.assert_close(
        plain(batch.dense_features, batch.sparse_features), model(batch.dense_features, batch.sparse_features)
    )
