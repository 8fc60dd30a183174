"""Write files/torchrec: a checkpoint of TorchRec 1.8.0 over two ranks, and files/torchrec.pt: what is in it.

    cd tests/checkpoint/files && python -O ../write_torchrec_files.py /tmp/meet     # with the Python of .venv-peer

The tables of `ebc` and `ec` are trained for three steps. `after.*` are their weights after a fourth step, on the
batches `batch.*`. TorchRec has no Adam for CPUs: the tables of `adam` get drawn values in the layout of its state, and
-O leaves out the assertion that refuses to make it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn

RANKS, ROWS, DIM, BAGS, LR, EPS = 2, 11, 16, 4, 0.1, 1e-8
EBC, EC, ADAM = ["rows", "columns", "table"], ["sequence"], ["adam_rows", "adam_columns", "adam_table"]
OUT = "torchrec"


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return ids and lengths of all features."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(EBC + EC) * BAGS,), generator=draw)
    return torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw), lengths


def wrapped() -> Any:
    """Return the sharded model: rows, columns and whole tables of two ranks."""
    import torchrec
    from torchrec import optim
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    def bags(names: list[str]) -> Any:
        return torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=[name])
                for name in names
            ]
        )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc, self.adam = bags(EBC), bags(ADAM)
            self.ec = torchrec.EmbeddingCollection(
                tables=[
                    torchrec.EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=[name])
                    for name in EC
                ]
            )
            self.over = nn.Linear(DIM * len(EBC), 1)

        def forward(self, features: Any) -> Tensor:
            pooled = self.over(self.ebc(features).values()).sum()
            return pooled + sum((jagged.values() ** 2).sum() for jagged in self.ec(features).values())

    torch.manual_seed(3)
    model = Model()
    for module in (model.ebc, model.ec):
        apply_optimizer_in_backward(optim.RowWiseAdagrad, module.parameters(), {"lr": LR, "eps": EPS})
    apply_optimizer_in_backward(optim.Adam, model.adam.parameters(), {"lr": LR})
    ways = [plans.row_wise(), plans.column_wise(ranks=[0, 1]), plans.table_wise(rank=1)]
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plan = {}
    for name, tables, sharder in (("ebc", EBC, 0), ("adam", ADAM, 0), ("ec", EC, 1)):
        plan[name] = plans.construct_module_sharding_plan(
            getattr(model, name), dict(zip(tables, ways, strict=False)), sharder=sharders[sharder], local_size=RANKS,
            world_size=RANKS, device_type="cpu",
        )  # fmt: skip
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=ShardingPlan(plan), sharders=sharders)


def whole(tensors: dict[Any, Any]) -> dict[Any, Tensor]:
    """Return copies of whole tensors, on every rank. A rank may lack tensors of which it has no part."""
    own: dict[Any, list[Any]] = {}
    for name, value in tensors.items():
        if hasattr(value, "local_shards"):
            parts = [(shard.metadata.shard_offsets, shard.tensor.detach().clone()) for shard in value.local_shards()]
        else:
            parts = [([0] * value.dim(), value.detach().clone())]
        own[name] = [tuple(value.size()), *parts]
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, own)
    found: dict[Any, Tensor] = {}
    for name, (size, *parts) in (pair for each in every for pair in each.items()):
        out = found.setdefault(name, torch.full(size, float("nan")))
        for offsets, part in parts:
            out[tuple(slice(first, first + n) for first, n in zip(offsets, part.shape, strict=True))] = part
    if any(value.isnan().any() for value in found.values()):
        raise ValueError("a part is missing")
    return found


def rank_main(rank: int, meet: str) -> None:
    from torchrec import KeyedJaggedTensor

    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    dmp = wrapped()

    def train(step: int) -> None:
        values, lengths = batch(rank, step)
        dmp(KeyedJaggedTensor([*EBC, *EC], values, lengths=lengths)).backward()

    for step in range(3):
        train(step)
    state = {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}
    draw = torch.Generator().manual_seed(rank)
    for slots in (slots for name, slots in state["optimizer"]["state"].items() if name.startswith("adam.")):
        for value in slots.values():
            for shard in value.local_shards():
                shard.tensor.copy_(torch.rand(shard.tensor.shape, generator=draw) / 100)
    dcp.save(state, checkpoint_id=OUT)
    found = whole({f"model.{name}": value for name, value in state["model"].items()})
    slots = {(name, slot): value for name, own in state["optimizer"]["state"].items() for slot, value in own.items()}
    for (name, slot), values in whole(slots).items():
        new = slot.split(".")[1].replace("momentum1", "exp_avg" if name.startswith("adam.") else "sum")
        if values.shape == (2 * ROWS,):
            values = ((values[:ROWS].double() + values[ROWS:].double()) / 2).float()
        found[f"optimizer.state.{name}.{new}"] = values
    train(3)
    found |= whole({f"after.{name}": value for name, value in dmp.state_dict().items() if name.startswith("e")})
    for each in range(RANKS):
        found[f"batch.{each}.values"], found[f"batch.{each}.lengths"] = batch(each, 3)
    if rank == 0:
        torch.save(found, f"{OUT}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if Path(OUT).exists():
        raise FileExistsError(f"remove {OUT} first")
    mp.spawn(rank_main, args=(sys.argv[1],), nprocs=RANKS)
