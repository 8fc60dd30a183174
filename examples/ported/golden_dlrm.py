"""A DLRM on random clicks, with TorchRec's imports: tables sharded with an optimizer in the backward, or replicated.

python -m tilerec.compat.torchrec examples/ported/golden_dlrm.py
torchrun --nproc-per-node 2 -m tilerec.compat.torchrec examples/ported/golden_dlrm.py --data-parallel
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


def constant_rows(weight: torch.Tensor) -> None:
    """Every row starts with the same numbers, so that the start does not depend on the library or on the plan."""
    with torch.no_grad():
        weight.copy_(torch.cos(torch.arange(weight.shape[-1], device=weight.device)).mul(0.1).expand_as(weight))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-parallel", action="store_true")
    parser.add_argument("--num-embeddings", type=int, default=1000)
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-batches", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=args.embedding_dim,
            num_embeddings=args.num_embeddings,
            feature_names=[name],
            init_fn=constant_rows,
        )
        for name in DEFAULT_CAT_NAMES
    ]
    torch.manual_seed(0)
    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=len(DEFAULT_INT_NAMES),
            dense_arch_layer_sizes=[32, args.embedding_dim],
            over_arch_layer_sizes=[32, 1],
            dense_device=device,
        )
    )
    torch.manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": args.learning_rate, "eps": 1e-8}
    )
    kinds, kernels = (["data_parallel"], ["dense"]) if args.data_parallel else (["table_wise"], ["fused"])
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size, "cpu", local_world_size=get_local_size(world_size)),
        batch_size=args.batch_size,
        constraints={t.name: ParameterConstraints(sharding_types=kinds, compute_kernels=kernels) for t in tables},
    ).collective_plan(model, [EmbeddingBagCollectionSharder()], dist.group.WORLD)
    model = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder()],
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=args.learning_rate, eps=1e-8),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    batches = RandomRecDataset(
        keys=DEFAULT_CAT_NAMES,
        batch_size=args.batch_size,
        hash_size=args.num_embeddings,
        ids_per_feature=2,
        num_dense=len(DEFAULT_INT_NAMES),
        manual_seed=rank,
        num_batches=args.num_batches,
        num_generated_batches=args.num_batches,
    )
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    iterator = iter(batches)
    step = 0
    while True:
        try:
            loss, _logits, _labels = pipeline.progress(iterator)
        except StopIteration:
            break
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world_size:.6f}")
        step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
