"""A DLRM trainer for Criteo arrays, with TorchRec's imports: training and evaluation loops, warm-up, AUROC.

Without `--in-memory-binary-criteo-path` it writes small random arrays into a temporary folder first.

    python -m tilerec.compat.torchrec examples/ported/criteo_trainer.py --epochs 2
"""

import argparse
import itertools
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection
from torchrec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DAYS,
    DEFAULT_CAT_NAMES,
    DEFAULT_INT_NAMES,
    INT_FEATURE_COUNT,
    InMemoryBinaryCriteoIterDataPipe,
)
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage


def constant_rows(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.cos(torch.arange(weight.shape[-1], device=weight.device)).mul(0.1).expand_as(weight))


def write_arrays(folder: str, rows: int) -> None:
    """A click is likelier for some values of the first category, so there is something to learn."""
    draw = np.random.default_rng(0)
    for day in (0, 1):
        dense = draw.standard_normal((rows, INT_FEATURE_COUNT)).astype(np.float32)
        sparse = draw.integers(0, 10_000, (rows, CAT_FEATURE_COUNT)).astype(np.int32)
        clicks = draw.random(rows) < np.where(sparse[:, 0] % 3 == 0, 0.8, 0.2)
        for name, array in (("dense", dense), ("sparse", sparse), ("labels", clicks.astype(np.int32)[:, None])):
            np.save(os.path.join(folder, f"day_{day}_{name}.npy"), array)


def dataloader(args: argparse.Namespace, stage: str) -> DataLoader:
    days = [0] if stage == "train" else [1]
    files = [
        [os.path.join(args.in_memory_binary_criteo_path, f"day_{day}_{kind}.npy") for day in days]
        for kind in ("dense", "sparse", "labels")
    ]
    return DataLoader(
        InMemoryBinaryCriteoIterDataPipe(
            stage,
            *files,
            batch_size=args.batch_size,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            drop_last=stage == "train",
            hashes=args.num_embeddings_per_feature,
        ),
        batch_size=None,
        collate_fn=lambda batch: batch,
    )


def evaluate(pipeline: TrainPipelineSparseDist, loader: DataLoader, stage: str) -> None:
    pipeline._model.eval()
    scores, labels = [], []
    iterator = iter(loader)
    with torch.no_grad():
        while True:
            try:
                _loss, logits, own = pipeline.progress(iterator)
            except StopIteration:
                break
            scores.append(torch.sigmoid(logits).reshape(-1))
            labels.append(own.reshape(-1))
    order = torch.cat(scores).argsort(stable=True)
    clicks = torch.cat(labels)[order].double()
    below = (1 - clicks).cumsum(0)
    auroc = (below * clicks).sum() / (clicks.sum() * (1 - clicks).sum())
    if dist.get_rank() == 0:
        print(f"{stage} auroc {auroc.item():.4f} samples {len(clicks)}")
    pipeline._model.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--in-memory-binary-criteo-path", default="")
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--rows", type=int, default=512)
    args = parser.parse_args()
    args.num_embeddings_per_feature = [300 + 7 * i for i in range(CAT_FEATURE_COUNT)]
    assert DAYS == 24
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    made = tempfile.TemporaryDirectory()
    if not args.in_memory_binary_criteo_path:
        args.in_memory_binary_criteo_path = made.name
        write_arrays(made.name, args.rows)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=args.embedding_dim, num_embeddings=rows, feature_names=[name],
            init_fn=constant_rows,
        )
        for name, rows in zip(DEFAULT_CAT_NAMES, args.num_embeddings_per_feature, strict=True)
    ]  # fmt: skip
    torch.manual_seed(0)
    model = DLRMTrain(
        DLRM_DCN(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=len(DEFAULT_INT_NAMES),
            dense_arch_layer_sizes=[32, args.embedding_dim],
            over_arch_layer_sizes=[32, 1],
            dcn_num_layers=2,
            dcn_low_rank_dim=8,
            dense_device=device,
        )
    )
    torch.manual_seed(1)
    for _, weight in sorted(model.named_parameters()):
        if not weight.is_meta:
            (nn.init.xavier_uniform_ if weight.dim() == 2 else nn.init.zeros_)(weight)
    fused_params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": args.learning_rate,
        "eps": 1e-8,
    }
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused_params)]
    assert any(sharder.module_type is EmbeddingBagCollection for sharder in get_default_sharders())
    plan = EmbeddingShardingPlanner(
        topology=Topology(
            local_world_size=dist.get_world_size(), world_size=dist.get_world_size(), compute_device="cpu"
        ),
        batch_size=args.batch_size,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    ).collective_plan(model, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=args.learning_rate, eps=1e-8),
    )
    optimizer = WarmupOptimizer(
        CombinedOptimizer([model.fused_optimizer, dense]),
        [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.25)],
        lr=args.learning_rate,
    )
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    train, val = dataloader(args, "train"), dataloader(args, "val")
    for epoch in range(args.epochs):
        iterator = iter(train)
        for step in itertools.count():
            try:
                loss, _logits, _labels = pipeline.progress(iterator)
            except StopIteration:
                break
            if dist.get_rank() == 0:
                print(f"step {epoch}.{step} loss {loss.item():.6f}")
        evaluate(pipeline, val, "val")
    made.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
