"""One rank of one side of `accuracy.py`: trains a model on given batches, and returns its held-out probabilities.

    PYTHON accuracy_rank.py SIDE FILE OUT RANK WORLD RENDEZVOUS

Both sides run this file, each in its own environment. They differ in the modules that they import and in the sharded
tables. Dense gradients are averaged by one all-reduce here, so that nothing else differs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def tilerec_model(job: dict[str, Any]) -> nn.Module:
    """Build the model with sharded tables here."""
    from tilerec.models.deepfm import SimpleDeepFMNN
    from tilerec.models.dlrm import DLRM
    from tilerec.modules.embedding_bag import EmbeddingBagCollection
    from tilerec.optim.attach import apply_optimizer_in_backward
    from tilerec.parallel.shard import shard
    from tilerec.spec.optimizer import SPECS
    from tilerec.spec.parameter_sharding import ParameterSharding
    from tilerec.spec.table import EmbeddingBagConfig

    tables = EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, dim, name, feature_names=features) for name, rows, dim, features in job["tables"]]
    )
    model = build(job, tables, DLRM, SimpleDeepFMNN)
    model.load_state_dict(job["state"])
    settings = {name: value for name, value in job["optimizer"].items() if name != "kind"}
    apply_optimizer_in_backward(SPECS[job["optimizer"]["kind"]], tables.parameters(), settings)
    world = dist.get_world_size()
    if world > 1:
        plan = {
            name: headed(name, rows, dim, world)
            if job["sharding"] == "head"
            else ParameterSharding("row_wise", hot=most_read(job, rows, features))
            if job["sharding"] == "hot"
            else ParameterSharding(job["sharding"], ranks=[t % world] if job["sharding"] == "table_wise" else None)
            for t, (name, rows, dim, features) in enumerate(job["tables"])
        }
        shard(tables, plan={"": plan})
    return model


def headed(name: str, rows: int, dim: int, world: int) -> Any:
    """Return a sharding with the first 5 % of the rows on every rank, and the others cut by rows."""
    from tilerec.spec.parameter_sharding import ParameterSharding
    from tilerec.spec.tile import Tiling

    head = -(-rows // 20)
    edges = [head + (rows - head) * rank // world for rank in range(world + 1)]
    tiles = [(0, head, 0, dim, range(world)), *((edges[r], edges[r + 1], 0, dim, r) for r in range(world))]
    return ParameterSharding("explicit", tiling=Tiling.of(name, rows, dim, tiles))


def most_read(job: dict[str, Any], rows: int, features: list[str]) -> Any:
    """Return a twentieth of a table's rows as hot ids: those that the training batches read most."""
    from tilerec.spec.hot_rows import HotRows

    counts, keys = torch.zeros(rows, dtype=torch.int64), job["keys"]
    for _, values, lengths, _ in job["train"]:
        parts = dict(zip(keys, values.split(lengths.view(len(keys), -1).sum(1).tolist()), strict=True))
        for feature in features:
            counts += torch.bincount(parts[feature], minlength=rows)
    return HotRows(counts.argsort(descending=True, stable=True)[: -(-rows // 20)])


def torchrec_model(job: dict[str, Any]) -> nn.Module:
    """Build TorchRec's model, with tables sharded by a plan made by hand; one rank is table-wise."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM

    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=features)
            for name, rows, dim, features in job["tables"]
        ]
    )
    model = build(job, tables, DLRM, SimpleDeepFMNN)
    model.load_state_dict(job["state"])
    kinds = {"SGD": "EXACT_SGD", "RowWiseAdagrad": "EXACT_ROWWISE_ADAGRAD", "Adagrad": "EXACT_ADAGRAD"}
    given = dict(job["optimizer"])
    fused = {"optimizer": getattr(EmbOptimType, kinds[given.pop("kind")]), "learning_rate": given.pop("lr"), **given}
    world = dist.get_world_size()
    each = {
        "table_wise": lambda t: sharding_plan.table_wise(rank=t % world, compute_kernel="fused"),
        "row_wise": lambda t: sharding_plan.row_wise(compute_kernel="fused"),
        "head": lambda t: sharding_plan.row_wise(compute_kernel="fused"),
        "hot": lambda t: sharding_plan.row_wise(compute_kernel="fused"),
        "column_wise": lambda t: sharding_plan.column_wise(ranks=list(range(world)), compute_kernel="fused"),
    }[job["sharding"] if world > 1 else "table_wise"]
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = sharding_plan.construct_module_sharding_plan(
        tables, {name: each(t) for t, (name, *_) in enumerate(job["tables"])}, sharder=sharder, local_size=world,
        world_size=world, device_type="cpu",
    )  # fmt: skip
    whole = {name: value.clone() for name, value in tables.state_dict().items()}
    sharded = sharder.shard(tables, plan, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"))
    for name, value in sharded.state_dict().items():
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.detach().copy_(whole[name][row : row + rows, column : column + columns])
    for module in model.modules():
        for name, child in list(module.named_children()):
            if child is tables:
                setattr(module, name, sharded)
    return model


def build(job: dict[str, Any], tables: nn.Module, dlrm: Any, deepfm: Any) -> nn.Module:
    """Return a model of a library, by the constructor that both libraries have."""
    if job["model"] == "DLRM":
        made: nn.Module = dlrm(tables, job["dense"], [32, job["tables"][0][2]], [64, 32, 1])
    else:
        made = deepfm(job["dense"], tables, hidden_layer_size=32, deep_fm_dimension=16)
    return made


def features_of(side: str) -> Any:
    """Return the class of sparse features of a library."""
    if side == "tilerec":
        from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
    else:
        from torchrec import KeyedJaggedTensor
    return KeyedJaggedTensor


def share(batch: tuple[Tensor, ...], rank: int, world: int, keys: int) -> tuple[Tensor, ...]:
    """Return a rank's samples of a global batch: a range of rows."""
    dense, values, lengths, labels = batch
    size = len(labels)
    low, high = size * rank // world, size * (rank + 1) // world
    parts = values.split(lengths.view(keys, -1).sum(1).tolist())
    kept = []
    for part, own in zip(parts, lengths.view(keys, -1), strict=True):
        ends = own.cumsum(0)
        first = int(ends[low - 1]) if low else 0
        kept.append(part[first : int(ends[high - 1])])
    return dense[low:high], torch.cat(kept), lengths.view(keys, -1)[:, low:high].reshape(-1), labels[low:high]


def main() -> None:
    """Train and evaluate; rank 0 writes the probabilities of each evaluation."""
    side, file, out, rank, world, rendezvous = (
        sys.argv[1],
        sys.argv[2],
        sys.argv[3],
        *map(int, sys.argv[4:6]),
        sys.argv[6],
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    job = torch.load(file)
    model = tilerec_model(job) if side == "tilerec" else torchrec_model(job)
    make, keys = features_of(side), job["keys"]
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=job["dense_lr"])

    def forward(batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        dense_features, values, lengths, labels = share(batch, rank, world, len(keys))
        output = model(dense_features, make(keys, values, lengths=lengths)).reshape(-1)
        return (output.sigmoid() if job["model"] == "DLRM" else output), labels

    def evaluate() -> Tensor:
        model.eval()
        with torch.no_grad():
            own = [forward(batch)[0].double() for batch in job["held_out"]]
        model.train()
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, own)
        return torch.cat([torch.cat([ranks[b] for ranks in gathered]) for b in range(len(own))])

    found = [evaluate()]
    for step, batch in enumerate(job["train"], 1):
        optimizer.zero_grad()
        probabilities, labels = forward(batch)
        # Ranks' means of shares of different sizes do not have the mean of the global batch as their mean.
        summed = nn.functional.binary_cross_entropy(probabilities, labels, reduction="sum")
        (summed * (world / len(batch[3]))).backward()
        if world > 1:
            flat = torch.cat([p.grad.reshape(-1) for p in dense if p.grad is not None])
            dist.all_reduce(flat)
            for p, mean in zip(dense, (flat / world).split([p.numel() for p in dense]), strict=True):
                p.grad = mean.view_as(p)
        optimizer.step()
        if step % job["eval_every"] == 0:
            found.append(evaluate())
    if not rank:
        torch.save(found, out)
    dist.barrier()
    os._exit(0)  # TorchRec's threads may abort the process at its end


if __name__ == "__main__":
    main()
