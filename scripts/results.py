"""Scores of the click models beside their baselines on MovieLens, and the search that chose their settings.

    python scripts/results.py --data ml-latest-small                       # tables of docs/results.md, as Markdown
    python scripts/results.py --data ml-latest-small --split time
    python scripts/results.py --data ml-latest-small --ranks 2             # tables sharded over two ranks
    python scripts/results.py --data ml-latest-small --search 30           # 30 random settings per model, on validation
    python scripts/results.py --criteo train.tiny.csv                      # the last tenth of the lines is the test
    python scripts/results.py --synthetic                                  # a stream whose clicks depend on products
    python scripts/results.py --wheel recbole-1.2.1-py3-none-any.whl       # MovieLens-100k, from a wheel of RecBole

A model is trained with 5 seeds, of its initial values and the order of its data. Scores are means over the seeds, with
the standard deviation behind ±. Baselines without training have no seed.

    popularity   the share of likes of the movie in the training part, smoothed towards the share of all movies
    user + item  the sum of the log-odds of both such shares, less those of all ratings

Both choose the strength of their smoothing on the validation part.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from tilerec.comms.process import ProcessGroupComms
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.hold_out import HoldOut
from tilerec.recipes.files import FilesData
from tilerec.recipes.model import DCNConfig, DLRMConfig, DLRMDCNConfig, LinearConfig, MLPConfig
from tilerec.recipes.movielens import MovieLensTableData
from tilerec.recipes.registry import make_run
from tilerec.spec.optimizer import Adagrad, Adam
from tilerec.testing import run_ranks
from tilerec.train.config import ModelConfig, RunConfig, TrainConfig
from tilerec.train.evaluate import Scores
from tilerec.train.loop import train
from tilerec.train.override import override_all

Floats = npt.NDArray[np.float64]
TaskScores = Mapping[str, Scores]

ONE_TASK = ("movielens_linear", "movielens_mlp", "movielens_dcn")
TWO_TASKS = ("movielens_linear", "movielens_shared_bottom", "movielens_mmoe", "movielens_ple")
CRITEO = ("criteo_linear", "criteo_dcn", "criteo_dlrm_dcn")
QUIET = ("train.log_every=1000000",)
FINALISTS = 8
SMOOTHING = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)

TRAINING = {
    "train.embedding_optimizer.lr": ("0.02", "0.05", "0.1", "0.2"),
    "train.embedding_optimizer.weight_decay": ("0", "1e-5", "1e-4"),
    "train.dense_optimizer.lr": ("0.001", "0.003"),
    "train.epochs": ("1", "2", "3", "4"),
    "model.embedding_dim": ("4", "8", "16"),
}
SPACES = {
    "movielens_linear": {
        "train.embedding_optimizer.lr": ("0.05", "0.1", "0.2", "0.5", "1.0"),
        "train.embedding_optimizer.weight_decay": ("0", "1e-5", "1e-4", "1e-3"),
        "train.dense_optimizer.lr": ("0.001", "0.01"),
        "train.epochs": ("1", "2", "4", "8", "16"),
        "model.mean_pooling": ("true", "false"),
    },
    "movielens_mlp": {**TRAINING, "model.layers": ("32", "64,32")},
    "movielens_dcn": {
        **TRAINING,
        "model.layers": ("32", "64,32"),
        "model.cross_layers": ("1", "2", "3"),
        "model.structure": ("stacked", "parallel"),
    },
    "movielens_shared_bottom": {**TRAINING, "model.bottom": ("32", "64"), "model.tower": ("", "16")},
    "movielens_mmoe": {
        **TRAINING,
        "model.experts": ("2", "4", "8"),
        "model.expert": ("32", "64"),
        "model.tower": ("", "16"),
    },
    "criteo_linear": {
        "train.embedding_optimizer.lr": ("0.01", "0.02", "0.05", "0.1"),
        "train.dense_optimizer.lr": ("0.003", "0.01", "0.03"),
        "train.epochs": ("1", "2", "4", "8", "16"),
    },
    "criteo_dlrm_dcn": {
        "train.embedding_optimizer.lr": ("0.01", "0.02", "0.05", "0.1"),
        "train.dense_optimizer.lr": ("0.001", "0.003", "0.01"),
        "train.epochs": ("1", "2", "4", "8"),
        "model.embedding_dim": ("4", "8", "16"),
        "model.low_rank": ("4", "16"),
        "model.cross_layers": ("1", "2", "3"),
    },
    "criteo_dcn": {
        "train.embedding_optimizer.lr": ("0.01", "0.02", "0.05", "0.1"),
        "train.dense_optimizer.lr": ("0.001", "0.003", "0.01"),
        "train.epochs": ("1", "2", "4", "8"),
        "model.embedding_dim": ("2", "4", "8"),
        "model.cross_layers": ("1", "2"),
        "model.layers": ("", "16", "32"),
    },
    "movielens_ple": {
        **TRAINING,
        "model.task_experts": ("1", "2"),
        "model.shared_experts": ("1", "2", "4"),
        "model.expert": ("32", "64"),
        "model.tower": ("", "16"),
    },
}
"""Settings to choose from, by recipe."""

CHOSEN: dict[tuple[str, str, int], tuple[str, ...]] = {
    ("movielens_linear", "user", 2): (
        "train.embedding_optimizer.lr=0.2",
        "train.embedding_optimizer.weight_decay=1e-5",
        "train.dense_optimizer.lr=0.001",
        "train.epochs=2",
        "model.mean_pooling=true",
    ),
    ("movielens_linear", "time", 1): (
        "train.embedding_optimizer.lr=0.1",
        "train.embedding_optimizer.weight_decay=0",
        "train.dense_optimizer.lr=0.01",
        "train.epochs=4",
        "model.mean_pooling=false",
    ),
    ("movielens_mlp", "time", 1): (
        "train.embedding_optimizer.lr=0.05",
        "train.embedding_optimizer.weight_decay=1e-5",
        "train.dense_optimizer.lr=0.003",
        "train.epochs=1",
        "model.embedding_dim=16",
        "model.layers=64,32",
    ),
    ("movielens_dcn", "time", 1): (
        "train.embedding_optimizer.lr=0.05",
        "train.embedding_optimizer.weight_decay=1e-5",
        "train.dense_optimizer.lr=0.001",
        "train.epochs=1",
        "model.embedding_dim=16",
        "model.layers=64,32",
        "model.cross_layers=2",
        "model.structure=stacked",
    ),
    ("criteo_linear", "lines", 1): (
        "train.embedding_optimizer.lr=0.01",
        "train.dense_optimizer.lr=0.003",
        "train.epochs=16",
    ),
    ("criteo_dcn", "lines", 1): (
        "train.embedding_optimizer.lr=0.02",
        "train.dense_optimizer.lr=0.003",
        "train.epochs=1",
        "model.embedding_dim=8",
        "model.cross_layers=1",
        "model.layers=32",
    ),
    ("criteo_dlrm_dcn", "lines", 1): (
        "train.embedding_optimizer.lr=0.02",
        "train.dense_optimizer.lr=0.003",
        "train.epochs=1",
        "model.embedding_dim=16",
        "model.low_rank=4",
        "model.cross_layers=3",
    ),
}
"""Settings by recipe, split and number of tasks, where they differ from the recipe's own."""


def log_odds(share: Floats) -> Floats:
    return np.log(share) - np.log1p(-share)


def shares(ids: npt.NDArray[np.int64], likes: Floats, of: npt.NDArray[np.int64], strength: float) -> Floats:
    """Return the smoothed share of likes of each id in `of`; that of all samples for unknown ids."""
    size = int(max(ids.max(initial=0), of.max(initial=0))) + 1
    count, liked = np.bincount(ids, minlength=size), np.bincount(ids, likes, minlength=size)
    smoothed: Floats = ((liked + strength * likes.mean()) / (count + strength))[of]
    return smoothed


def baseline(data: MovieLensTableData, like: float, strength: tuple[float, float], *, users: bool) -> Scores:
    """Return the scores of rates of movies, and of users if wanted, on the held-out part."""
    rows = data.table().rows
    held_out = rows["part"].to_numpy() >= (1 if data.validation else 2)
    likes = (rows["rating"].to_numpy() >= like).astype(np.float64)
    score = log_odds(
        shares(rows["movie"].to_numpy()[~held_out], likes[~held_out], rows["movie"].to_numpy(), strength[0])
    )
    if users:
        user = rows["user"].to_numpy()
        score += log_odds(shares(user[~held_out], likes[~held_out], user, strength[1])) - log_odds(
            likes[~held_out].mean()
        )
    probability = torch.from_numpy(1 / (1 + np.exp(-score[held_out])))
    return Scores.of(probability, torch.from_numpy(likes[held_out]).float())


def best_baseline(data: MovieLensTableData, like: float, *, users: bool) -> Scores:
    """Return the scores of the smoothing that is best on the validation part."""
    choices = [(item, user) for item in SMOOTHING for user in (SMOOTHING if users else (1.0,))]
    validation = replace(data, validation=True)
    best = min(choices, key=lambda one: baseline(validation, like, one, users=users).log_loss)
    return baseline(data, like, best, users=users)


def run_of(recipe: str, data: str, split: str, tasks: int, seed: int, extra: tuple[str, ...] = ()) -> RunConfig:
    """Return the run of a recipe with the settings chosen for a split, and a seed."""
    likes = "4,5" if tasks == 2 else "4"
    own = CHOSEN.get((recipe, split, tasks), ())
    sets = (f"data.split={split}", f"data.likes={likes}", *QUIET, *own, *extra)
    return override_all(make_run(recipe, data), [*sets, f"train.seed={seed}", f"data.seed={seed}"])


def criteo_run(model: str, folder: str, validation: bool, seed: int, extra: tuple[str, ...] = ()) -> RunConfig:
    """Return the run of a model on the parts that `split_lines` wrote."""
    counts, categories = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
    columns = Columns(
        labels=(LabelColumn("Label"),),
        dense=tuple(DenseColumn(name, transform="log", missing="zero") for name in counts),
        ids=tuple(IdColumn(name, missing="row") for name in categories),
        tables=tuple(TableRows(name, 10_000) for name in categories),
    )
    parts = ["train.csv"] if validation else ["train.csv", "validation.csv"]
    held_out = "validation.csv" if validation else "test.csv"
    data = FilesData(
        tuple(f"{folder}/{part}" for part in parts),
        columns,
        hold_out=HoldOut(path=(f"{folder}/{held_out}",)),
        seed=seed,
    )
    config: ModelConfig = {
        "criteo_linear": LinearConfig(),
        "criteo_dcn": DCNConfig(),
        "criteo_dlrm_dcn": DLRMDCNConfig(dense_arch=(32,), over_arch=(32,)),
    }[model]
    train = TrainConfig(batch_size=64, embedding_optimizer=Adagrad(), dense_optimizer=Adam(), seed=seed)
    return override_all(RunConfig(model, data, config, train), [*QUIET, *CHOSEN.get((model, "lines", 1), ()), *extra])


def split_lines(file: str, folder: Path) -> None:
    """Write the last tenth of a file's lines as the test part, and the tenth before it as the validation part."""
    head, *lines = Path(file).read_text().splitlines()
    tenth = len(lines) // 10
    parts = {"train": lines[: -2 * tenth], "validation": lines[-2 * tenth : -tenth], "test": lines[-tenth:]}
    for name, part in parts.items():
        (folder / f"{name}.csv").write_text("\n".join([head, *part]) + "\n")


def criteo_table(folder: str, seeds: int, ranks: int) -> None:
    """Print the scores on the lines of a Criteo file as Markdown."""
    labels = [float(line.split(",")[1]) for line in (Path(folder) / "test.csv").read_text().splitlines()[1:]]
    seen = [
        float(line.split(",")[1])
        for part in ("train", "validation")
        for line in (Path(folder) / f"{part}.csv").read_text().splitlines()[1:]
    ]
    constant = Scores.of(torch.full((len(labels),), float(np.mean(seen)), dtype=torch.float64), torch.tensor(labels))
    print(f"\n| {len(labels)} lines, {ranks} ranks | AUC | log loss |\n|---|---:|---:|")
    print(f"| share of clicks | 0.5000 | {constant.log_loss:.4f} |")
    for model in CRITEO:
        found = trained([criteo_run(model, folder, False, seed) for seed in range(seeds)], ranks)
        scores = [one["Label"] for one in found]
        print(f"| `{model}` | {spread([s.auc for s in scores])} | {spread([s.log_loss for s in scores])} |", flush=True)


def synthetic_run(model: str, seed: int) -> RunConfig:
    """Return the run of a model on a million samples of the planted stream, with large weights of pairs of features."""
    config: ModelConfig = {
        "linear": LinearConfig(mean_pooling=True),
        "mlp": MLPConfig(init_bound=0.1),
        "dlrm": DLRMConfig(dense_arch=(32,), mean_pooling=True, init_bound=0.1),
        "dcn": DCNConfig(init_bound=0.1),
    }[model]
    sets = ("data.train_rows=1000000", "data.pair_scale=1.0", "data.main_scale=0.5", "train.decay_steps=460")
    return override_all(replace(make_run("synthetic"), model=config), [*sets, f"train.seed={seed}", *QUIET])


def synthetic_table(seeds: int, ranks: int) -> None:
    """Print the scores on the planted stream as Markdown, and the best that any model can reach."""
    print(f"\n| 65,536 samples, {ranks} ranks | AUC | log loss |\n|---|---:|---:|")
    for model in ("linear", "mlp", "dlrm", "dcn"):
        scores = [one["click"] for one in trained([synthetic_run(model, seed) for seed in range(seeds)], ranks)]
        print(f"| `{model}` | {spread([s.auc for s in scores])} | {spread([s.log_loss for s in scores])} |", flush=True)
    data = synthetic_run("linear", 0).data.open()
    truth = data.best_predictions()
    assert truth is not None
    best = Scores.of(truth, torch.cat([batch.labels for batch in data.held_out(4096)]))
    print(f"| best reachable | {best.auc:.4f} | {best.log_loss:.4f} |")


def trained(runs: list[RunConfig], ranks: int) -> list[TaskScores]:
    """Return the held-out scores of each task for each run."""
    if ranks == 1:
        torch.set_num_threads(1)
        return [train(run).tasks for run in runs]
    return list(run_ranks(ranks, _trained_on_rank, runs, timeout_s=3_600.0)[0])


def _trained_on_rank(runs: list[RunConfig]) -> list[TaskScores]:
    return [train(run, group=ProcessGroupComms()).tasks for run in runs]


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"


def search_run(recipe: str, data: str, split: str, tasks: int, seed: int, sets: tuple[str, ...]) -> RunConfig:
    """Return the run of a recipe with other settings, which holds out the validation part."""
    return run_of(recipe, data, split, tasks, seed, ("data.validation=true", *sets))


def search(recipe: str, trials: int, build: Callable[[int, tuple[str, ...]], RunConfig]) -> None:
    """Print the best of random settings on the validation part, by log loss.

    One seed finds the best few, and other seeds choose among them: the spread over seeds is larger than the differences
    between good settings, so the best of one seed is lucky.

    Args:
        build: returns the run with a seed and settings, which holds out the validation part.
    """
    draw, space = Random(0), SPACES[recipe]
    found: dict[tuple[str, ...], float] = {}
    while len(found) < min(trials, math.prod(map(len, space.values()))):
        sets = tuple(f"{name}={draw.choice(values)}" for name, values in space.items())
        if sets not in found:
            found[sets] = mean_log_loss([build(0, sets)])
    best = sorted(found, key=found.__getitem__)[:FINALISTS]
    again = {sets: mean_log_loss([build(seed, sets) for seed in range(1, 5)]) for sets in best}
    print(f"# {recipe}: {len(found)} settings, log loss on validation with four other seeds")
    for sets in sorted(again, key=again.__getitem__):
        print(f"# {again[sets]:.4f} (first seed {found[sets]:.4f})\n{sets}", flush=True)


def mean_log_loss(runs: list[RunConfig]) -> float:
    """Return the mean held-out log loss of runs and tasks."""
    return float(np.mean([Scores.mean(scores.values()).log_loss for scores in trained(runs, 1)]))


def table(data: str, split: str, tasks: int, seeds: int, ranks: int, recipes: Sequence[str]) -> None:
    """Print the scores of some models and of the baselines as Markdown."""
    config = MovieLensTableData(data, split=split)  # type: ignore[arg-type]
    likes = {f"rating_{one:g}": one for one in ((4.0, 5.0) if tasks == 2 else (4.0,))}
    heads = [f"{score} {task}" for task in likes for score in ("AUC", "log loss")]
    print(f"\n| split by {split}, {ranks} ranks | " + " | ".join(heads) + " |\n|---" + "|---:" * len(heads) + "|")
    for name, users in (("popularity", False), ("user + item", True)):
        scores = [best_baseline(config, like, users=users) for like in likes.values()]
        print(f"| {name} | " + " | ".join(f"{s.auc:.4f} | {s.log_loss:.4f}" for s in scores) + " |", flush=True)
    for recipe in recipes:
        found = trained([run_of(recipe, data, split, tasks, seed) for seed in range(seeds)], ranks)
        cells = []
        for task in likes:
            cells.append(spread([scores[task].auc for scores in found]))
            cells.append(spread([scores[task].log_loss for scores in found]))
        print(f"| `{recipe}` | " + " | ".join(cells) + " |", flush=True)


def unpack(wheel: str, folder: Path) -> str:
    """Write the MovieLens-100k of RecBole's wheel in the format of newer editions."""
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist() if "ml-100k" in name}

        def lines(name: str) -> list[list[str]]:
            text = archive.read(names[name]).decode()
            return list(csv.reader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))[1:]

        with (folder / "ratings.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["userId", "movieId", "rating", "timestamp"], *lines("ml-100k.inter")])
        movies = [
            [m, f"{title} ({year})", "|".join(genres.split())] for m, title, year, genres in lines("ml-100k.item")
        ]
        with (folder / "movies.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["movieId", "title", "genres"], *movies])
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of a MovieLens edition with ratings.csv and movies.csv")
    parser.add_argument("--criteo", help="file in the format of the Criteo challenge, with a header")
    parser.add_argument("--synthetic", action="store_true", help="a stream with a known best score")
    parser.add_argument("--wheel", help="wheel of RecBole, which contains MovieLens-100k")
    parser.add_argument("--split", choices=("user", "time"), default="user")
    parser.add_argument("--tasks", type=int, choices=(1, 2), nargs="*", default=(1, 2))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--search", type=int, default=0, help="number of random settings per model")
    parser.add_argument(
        "--only", choices=[one for one in SPACES if one.startswith("movielens")], help="this recipe of MovieLens alone"
    )
    given = parser.parse_args()
    if sum(bool(one) for one in (given.data, given.wheel, given.criteo, given.synthetic)) != 1:
        sys.exit("Pass one of --data FOLDER, --wheel FILE, --criteo FILE and --synthetic.")
    if given.synthetic:
        synthetic_table(given.seeds, given.ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.criteo:
            split_lines(given.criteo, Path(folder))
            if not given.search:
                criteo_table(folder, given.seeds, given.ranks)
                return
            for model in CRITEO:
                search(model, given.search, partial(criteo_run, model, folder, True))
            return
        data = given.data or unpack(given.wheel, Path(folder))
        for tasks in given.tasks:
            recipes = (given.only,) if given.only else TWO_TASKS if tasks == 2 else ONE_TASK
            if not given.search:
                table(data, given.split, tasks, given.seeds, given.ranks, recipes)
                continue
            print(f"# split={given.split}, {tasks} tasks")
            for recipe in recipes:
                search(recipe, given.search, partial(search_run, recipe, data, given.split, tasks))


if __name__ == "__main__":
    main()
