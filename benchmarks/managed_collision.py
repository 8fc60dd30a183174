"""Claim: with ids of 64 bits and managed collision, the MovieLens model has the score of a dense id map.

The recipe's model and batches, with its user and movie numbers hashed to 64 bits first. Compared, over several seeds:

    dense map    row numbers of the data set, which has read all ids beforehand
    managed      `HashZchManagedCollisionModule`: ids are mapped as they occur; at several sizes of the tables
    modulo       row = id mod rows, at the same sizes: colliding ids share a row

Prints held-out AUC, collisions and evictions. Fails if the managed table with space for all ids is worse than the dense
map by more than the tolerance.

    python benchmarks/managed_collision.py --data ml-latest-small
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.modules.mlp import MLP
from tilerec.recipes.model import DotConfig, dot_logits
from tilerec.recipes.registry import make_run
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.train.config import RunConfig
from tilerec.train.evaluate import evaluate
from tilerec.train.loss import click_loss
from tilerec.train.optimizers import Optimizers
from tilerec.train.override import override_all

TOLERANCE = 1e-3
CPU = torch.device("cpu")
NAMES = ("user", "movie")


class Result(NamedTuple):
    """One training run: held-out AUC, statistics of its tables, samples per second of training."""

    auc: float
    notes: str
    speed: float


def buckets_of(rows: int) -> int:
    """Return 768, halved until a bucket has 64 rows: some small buckets overflow long before the table is full."""
    buckets = 768
    while buckets % 2 == 0 and rows < 64 * buckets:
        buckets //= 2
    return buckets


class Ids(nn.Module):
    """Converts row numbers of the data set to ids of 64 bits; another module maps these."""

    def __init__(self, dataset: Dataset, tables: nn.Module, dim: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(64)
        self.ids = {
            feature.name: torch.randint(-(2**63), 2**63 - 1, (feature.num_rows,), generator=generator)
            for feature in dataset.sparse_features
        }
        assert all(ids.unique().numel() == ids.numel() for ids in self.ids.values())
        self.tables = tables
        self.over_arch = nn.Sequential(MLP(2 * dim, list(layers)), nn.Linear(layers[-1], 1))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        values = torch.cat([self.ids[name][sparse_features[name].values()] for name in NAMES])
        features = KeyedJaggedTensor(list(NAMES), values, lengths=sparse_features.lengths())
        return dot_logits(self.tables(features).values(), self.over_arch)


class Managed(nn.Module):
    """Tables behind managed collision."""

    def __init__(self, configs: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        modules = {
            config.name: HashZchManagedCollisionModule(
                config.num_embeddings,
                "cpu",
                buckets_of(config.num_embeddings),
                eviction_policy_name="LRU_EVICTION",
            )
            for config in configs
        }
        self.both = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(configs), ManagedCollisionCollection(modules, configs)
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.both(features)[0]

    def notes(self) -> str:
        stats = self.both.stats()
        return "; ".join(
            f"{name}: {own.live} live, {own.total.evictions} evictions, {own.total.collisions} collisions, "
            f"{own.total.misses} of {own.total.reads} held out without a row"
            for name, own in stats.items()
        )


class Modulo(nn.Module):
    """Tables whose rows are ids modulo their number."""

    def __init__(self, configs: list[EmbeddingBagConfig], ids: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(configs)
        self.rows = {config.feature_names[0]: config.num_embeddings for config in configs}
        self.of = ids

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        values = torch.cat([features[name].values() % self.rows[name] for name in NAMES])
        return self.tables(KeyedJaggedTensor(list(NAMES), values, lengths=features.lengths()))

    def notes(self) -> str:
        parts = []
        for name, rows in self.rows.items():
            ids = self.of(name)
            parts.append(
                f"{name}: {ids.numel() - (ids % rows).unique().numel()} of {ids.numel()} ids without a row of their own"
            )
        return "; ".join(parts)


class Rows(nn.Module):
    """The data set's own row numbers: the inverse of `Ids`."""

    def __init__(self, configs: list[EmbeddingBagConfig], ids: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(configs)
        self.sorted = {name: torch.sort(ids(name)) for name in NAMES}

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        values = torch.cat(
            [
                self.sorted[name].indices[torch.searchsorted(self.sorted[name].values, features[name].values())]
                for name in NAMES
            ]
        )
        return self.tables(KeyedJaggedTensor(list(NAMES), values, lengths=features.lengths()))

    def notes(self) -> str:
        return ""


def train(
    run: RunConfig, dataset: Dataset, epochs: list[list[Batch]], held_out: list[Batch], make: str,
    sizes: dict[str, int], seed: int,
) -> Result:  # fmt: skip
    """Train once. All runs of a seed have the same MLP, and initial rows from the same range."""
    assert isinstance(run.model, DotConfig)
    torch.manual_seed(seed)
    configs = [
        EmbeddingBagConfig(
            sizes[feature.name],
            run.model.embedding_dim,
            f"{feature.name}_table",
            feature_names=[feature.name],
            weight_init_min=-((1 / feature.num_rows) ** 0.5),
            weight_init_max=(1 / feature.num_rows) ** 0.5,
        )
        for feature in dataset.sparse_features
    ]
    model = Ids(dataset, nn.Identity(), run.model.embedding_dim, run.model.layers)
    makers: dict[str, Callable[[], nn.Module]] = {
        "dense map": lambda: Rows(configs, model.ids.__getitem__),
        "managed": lambda: Managed(configs),
        "modulo": lambda: Modulo(configs, model.ids.__getitem__),
    }
    model.tables = makers[make]()
    config = replace(run.train, seed=seed)
    optimizers = Optimizers(model, config)
    samples, seconds = 0, 0.0
    for batches in epochs:
        since = time.perf_counter()
        for batch in batches:
            optimizers.prepare(0)
            click_loss(model(batch.dense_features, batch.sparse_features), batch.labels).backward()
            optimizers.step()
            samples += batch.batch_size
        seconds += time.perf_counter() - since
    scores = evaluate(model, iter(held_out), CPU)
    notes = model.tables.notes
    assert callable(notes)
    return Result(scores.auc, str(notes()), samples / seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="ratings.csv or its folder")
    parser.add_argument("--seeds", type=int, default=5, help="of the table")
    parser.add_argument("--pairs", type=int, default=16, help="seeds of the claim: dense map and managed, with room")
    parser.add_argument("--set", action="append", default=[], help="change a setting of the recipe")
    arguments = parser.parse_args()
    run = override_all(make_run("movielens", arguments.data), arguments.set)
    dataset = run.data.open()
    known = {feature.name: feature.num_rows for feature in dataset.sparse_features}
    epochs = [list(dataset.train(run.train.batch_size, epoch)) for epoch in range(run.train.epochs)]
    held_out = list(dataset.held_out(run.train.eval_batch_size))

    def rows(factor: float) -> dict[str, int]:
        """Return the number of rows in whole buckets for about this many rows per id."""
        sizes = {}
        for name, ids in known.items():
            unit = buckets_of(round(factor * ids))
            sizes[name] = round(factor * ids / unit) * unit
        return sizes

    cases: list[tuple[str, str, dict[str, int]]] = [("dense map", "all ids known", known)]
    for factor, words in ((2.0, "2 rows per id"), (1.0, "1 row per id"), (0.5, "1 row per 2 ids")):
        cases += [(make, words, rows(factor)) for make in ("managed", "modulo")]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}; "
        f"{known['user'] - 1} users, {known['movie'] - 1} movies, {arguments.seeds} seeds"
    )
    print(f"{'ids':12}{'size':18}{'rows (user, movie)':>20}{'AUC':>10}{'+-':>9}{'samples/s':>12}")
    for make, words, sizes in cases:
        results = [train(run, dataset, epochs, held_out, make, sizes, seed) for seed in range(arguments.seeds)]
        aucs = [result.auc for result in results]
        mean = statistics.mean(aucs)
        spread = statistics.stdev(aucs) if len(aucs) > 1 else 0.0
        print(
            f"{make:12}{words:18}{sizes['user']:>11,} {sizes['movie']:>8,}{mean:>10.5f}{spread:>9.5f}"
            f"{statistics.median(result.speed for result in results):>12,.0f}"
        )
        if results[-1].notes:
            print(f"{'':12}last seed: {results[-1].notes}")
    roomy = rows(2.0)
    differences = []
    for seed in range(arguments.pairs):
        pair = [
            train(run, dataset, epochs, held_out, make, sizes, seed).auc
            for make, sizes in (("managed", roomy), ("dense map", known))
        ]
        differences.append(pair[0] - pair[1])
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    print(
        f"managed with room - dense map, {arguments.pairs} seeds: {mean:+.5f} +- {error:.5f} AUC "
        f"(tolerance {TOLERANCE:g})"
    )
    return 0 if mean >= -TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
