"""Claim: trained with Adagrad, the MovieLens model has the score of the same model in plain torch.

The recipe's model, batches and initial values run twice: through `tilerec` (the backward pass updates the tables), and
as `torch.nn.EmbeddingBag` tables with `torch.optim.Adagrad` over all parameters. Prints both held-out scores and
fails if the AUCs differ by more than the tolerance.

    python benchmarks/movielens_parity.py --data ml-latest-small
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilerec.data.dataset import Dataset
from tilerec.recipes.model import DotModel, dot_logits
from tilerec.recipes.registry import make_run
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adagrad
from tilerec.train.config import RunConfig, TrainConfig
from tilerec.train.evaluate import Scores, evaluate
from tilerec.train.loss import click_loss
from tilerec.train.optimizers import Optimizers
from tilerec.train.override import override_all

TOLERANCE = 1e-3
CPU = torch.device("cpu")


class PlainModel(nn.Module):
    """`DotModel` on `torch.nn.EmbeddingBag`, with a copy of another model's initial values."""

    def __init__(self, model: DotModel) -> None:
        super().__init__()
        tables = model.embedding_bag_collection.embedding_bag_configs()
        self.features = [table.feature_names[0] for table in tables]
        self.tables = nn.ModuleList()
        for parameter in model.embedding_bag_collection.parameters():
            weight = parameter.detach().clone()
            self.tables.append(nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum"))
        self.over_arch = copy.deepcopy(model.over_arch)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pooled = []
        for feature, table in zip(self.features, self.tables, strict=True):
            ids = sparse_features[feature]
            pooled.append(table(ids.values(), ids.offsets()[:-1]))
        return dot_logits(torch.cat(pooled, dim=1), self.over_arch)


@dataclass(frozen=True)
class Side:
    """One of the two runs: its scores and its speed in samples per second of training."""

    scores: Scores
    samples_per_second: float


def train_tilerec(model: nn.Module, dataset: Dataset, config: TrainConfig) -> Side:
    optimizers = Optimizers(model, config)
    samples, seconds = 0, 0.0
    for epoch in range(config.epochs):
        since = time.perf_counter()
        for batch in dataset.train(config.batch_size, epoch):
            optimizers.prepare(0)
            click_loss(model(batch.dense_features, batch.sparse_features), batch.labels).backward()
            optimizers.step()
            samples += batch.batch_size
        seconds += time.perf_counter() - since
    return Side(evaluate(model, dataset.held_out(config.eval_batch_size), CPU), samples / seconds)


def train_plain(model: nn.Module, dataset: Dataset, config: TrainConfig) -> Side:
    embedding, dense = config.embedding_optimizer, config.dense_optimizer
    tables = [parameter for name, parameter in model.named_parameters() if name.startswith("tables.")]
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("tables.")]
    optimizer = torch.optim.Adagrad(
        [{"params": tables, "lr": embedding.lr}, {"params": others, "lr": dense.lr}], eps=1e-10
    )
    samples, seconds = 0, 0.0
    for epoch in range(config.epochs):
        since = time.perf_counter()
        for batch in dataset.train(config.batch_size, epoch):
            optimizer.zero_grad()
            logits = model(batch.dense_features, batch.sparse_features)
            nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            optimizer.step()
            samples += batch.batch_size
        seconds += time.perf_counter() - since
    return Side(evaluate(model, dataset.held_out(config.eval_batch_size), CPU), samples / seconds)


def compare(run: RunConfig) -> tuple[Side, Side]:
    """Run both implementations of a run whose model is the dot model and whose optimizers are Adagrad."""
    for spec in (run.train.embedding_optimizer, run.train.dense_optimizer):
        if spec != Adagrad(lr=spec.lr):
            raise SystemExit(f"This comparison is about Adagrad with its defaults; the run has {spec}.")
    if run.train.warmup_steps or run.train.decay_steps or run.train.max_steps:
        raise SystemExit("This comparison has no learning-rate schedule and no limit on steps; leave them at 0.")
    dataset = run.data.open()
    torch.manual_seed(run.train.seed)
    model = run.model.build(dataset, CPU)
    assert isinstance(model, DotModel)
    plain = PlainModel(model)
    return train_tilerec(model, dataset, run.train), train_plain(plain, dataset, run.train)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="ratings.csv or its folder")
    parser.add_argument("--set", action="append", default=[], help="change a setting of the recipe: name=value")
    arguments = parser.parse_args()
    ours, plain = compare(override_all(make_run("movielens", arguments.data), arguments.set))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{'':22}{'AUC':>10}{'log loss':>10}{'NE':>10}{'samples/s':>12}")
    for name, side in (("tilerec", ours), ("torch.nn.EmbeddingBag", plain)):
        scores = side.scores
        print(
            f"{name:22}{scores.auc:>10.6f}{scores.log_loss:>10.6f}{scores.ne:>10.6f}{side.samples_per_second:>12,.0f}"
        )
    difference = abs(ours.scores.auc - plain.scores.auc)
    print(f"AUC difference {difference:.2e} (tolerance {TOLERANCE:g}), {ours.scores.samples:,} held-out samples")
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
