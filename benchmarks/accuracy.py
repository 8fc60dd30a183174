"""Accuracy beside TorchRec: the same models, initial values, batches and optimizers give the same scores.

    python benchmarks/accuracy.py --peer .venv-peer/bin/python [--data ml-latest-small] [--steps 300] [--ranks 1,2]

DLRM and DeepFM train on MovieLens' ratings (with `--data`) and on the generated stream, on both sides on 1 and 2 ranks
with tables sharded by tables, rows and columns; "head": here the first 5 % of the rows are on every rank and the others
cut by rows; "hot": here the 5 % of the rows that batches read most are `HotRows` beside row-wise tables. TorchRec's
tables are row-wise in both. Tables train by SGD, row-wise Adagrad or Adagrad in the backward pass
(FBGEMM has no other optimizer on CPU), dense parameters by SGD. Held-out AUC and log loss are compared at every
evaluation. The script fails above `--tolerance`.

Each side is also compared with itself on one rank: "own" and "TorchRec's own" are the largest differences that sharding
makes. TorchRec keeps one sum per row and column block for row-wise Adagrad, so its column-wise tables train by another
rule than whole ones; a difference that TorchRec has to itself does not fail the script.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.data.share import cut
from tilerec.metrics.functional import auc, log_loss
from tilerec.models.deepfm import SimpleDeepFMNN
from tilerec.models.dlrm import DLRM
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.recipes.registry import make_run
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.train.override import override_all

sys.path.insert(0, str(Path(__file__).parent))

from accuracy_rank import build

DIM = 16
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"kind": "SGD", "lr": 0.5},
    "RowWiseAdagrad": {"kind": "RowWiseAdagrad", "lr": 0.05, "eps": 1e-8},
    "Adagrad": {"kind": "Adagrad", "lr": 0.05, "eps": 1e-8},
}
SHARDINGS = ("table_wise", "row_wise", "column_wise", "head", "hot")


def parts(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return a batch as plain tensors, cut to an even size: TorchRec's row-wise tables need equal shares over gloo."""
    batch = cut(batch, 0, batch.batch_size - batch.batch_size % 2)
    features = batch.sparse_features
    return batch.dense_features, features.values(), features.lengths().long(), batch.labels.float()


def job_of(dataset: Dataset, model: str, steps: int, batch_size: int, eval_every: int) -> dict[str, Any]:
    """Return batches, tables and initial values, as both sides read them."""
    features = dataset.sparse_features
    tables = [(f"t_{one.name}", one.num_rows, DIM, [one.name]) for one in features]
    epochs = itertools.chain.from_iterable(dataset.train(batch_size, epoch) for epoch in itertools.count())
    job: dict[str, Any] = {
        "model": model,
        "keys": [one.name for one in features],
        "tables": tables,
        "dense": len(dataset.dense_features),
        "train": [parts(batch) for batch in itertools.islice(epochs, steps)],
        "held_out": [parts(batch) for batch in dataset.held_out(4096)],
        "eval_every": eval_every,
        "dense_lr": 0.1,
    }
    torch.manual_seed(0)
    configs = [EmbeddingBagConfig(rows, dim, name, feature_names=names) for name, rows, dim, names in tables]
    job["state"] = build(job, EmbeddingBagCollection(configs), DLRM, SimpleDeepFMNN).state_dict()
    return job


def scores(job: dict[str, Any], python: str, side: str, ranks: int, folder: Path) -> list[tuple[float, float]]:
    """Train one side in new processes; return AUC and log loss of each evaluation."""
    file, out, rendezvous = folder / "job.pt", folder / f"{side}.pt", folder / f"{side}.rendezvous"
    torch.save(job, file)
    rendezvous.unlink(missing_ok=True)
    script = str(Path(__file__).with_name("accuracy_rank.py"))
    started = [
        subprocess.Popen(
            [python, script, side, str(file), str(out), str(rank), str(ranks), str(rendezvous)],
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for process in started:
        _, errors = process.communicate(timeout=900)
        if process.returncode:
            raise SystemExit(f"{side}: {errors[-3000:]}")
    labels = torch.cat([batch[3] for batch in job["held_out"]])
    return [(auc(p, labels).item(), log_loss(p, labels).item()) for p in torch.load(out)]


def difference(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the largest differences of AUC and log loss over all evaluations."""
    pairs = list(zip(one, other, strict=True))
    return max(abs(a[0] - b[0]) for a, b in pairs), max(abs(a[1] - b[1]) for a, b in pairs)


def main() -> int:
    """Run all combinations and print one line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", required=True, help="a Python with TorchRec")
    parser.add_argument("--data", default="", help="MovieLens: ratings.csv or its folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--eval-every", type=int, default=60)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--models", default="DLRM,DeepFM")
    parser.add_argument("--shardings", default=",".join(SHARDINGS))
    parser.add_argument("--tolerance", type=float, default=1e-3)
    given = parser.parse_args()
    small = ["data.train_rows=400000", "data.held_out_rows=20000"]
    data = {"generated": override_all(make_run("synthetic"), small).data.open()}
    if given.data:
        data["MovieLens"] = make_run("movielens_dcn", given.data).data.open()
    head = ["data", "model", "optimizer", "ranks", "sharding", "AUC", "log loss", "AUC apart", "log loss apart", "own"]
    print(f"| {' | '.join(head)} | TorchRec's own |")
    print("|---" * 11 + "|")
    worst = 0.0
    for (name, dataset), model, optimizer in itertools.product(
        data.items(), given.models.split(","), given.optimizers.split(",")
    ):
        job = job_of(dataset, model, given.steps, given.batch, given.eval_every)
        job["optimizer"], base, peer_base = OPTIMIZERS[optimizer], None, None
        for ranks in map(int, given.ranks.split(",")):
            for sharding in given.shardings.split(",") if ranks > 1 else ["table_wise"]:
                job["sharding"] = sharding
                with tempfile.TemporaryDirectory() as folder:
                    ours = scores(job, sys.executable, "tilerec", ranks, Path(folder))
                    peer = scores(job, given.peer, "torchrec", ranks, Path(folder))
                base, peer_base = base or ours, peer_base or peer
                found = difference(ours, peer)
                own, theirs = max(difference(ours, base)), max(difference(peer, peer_base))
                if max(found) > 2 * theirs or max(found) <= given.tolerance:
                    worst = max(worst, *found)
                what = [name, model, optimizer, str(ranks), sharding if ranks > 1 else ""]
                last = [f"{score:.6f}" for score in ours[-1]]
                print(
                    f"| {' | '.join([*what, *last])} | {found[0]:.1e} | {found[1]:.1e} | {own:.1e} | {theirs:.1e} |",
                    flush=True,
                )
    print(f"largest difference {worst:.1e}, tolerance {given.tolerance:g}")
    return int(worst > given.tolerance)


if __name__ == "__main__":
    sys.exit(main())
