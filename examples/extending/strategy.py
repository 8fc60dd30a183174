"""A sharding strategy of your own: hot rows have a copy on every rank, cold rows are cut into ranges.

torchrun --nproc-per-node 2 examples/extending/strategy.py EMPTY_FOLDER

Ids are numbered by frequency here (0 is the most frequent), so the hot rows are the first ones. Each rank reads hot
rows from its own copy, and only ids of cold rows travel.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, shard
from tilerec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tilerec.parallel import full_state_dict
from tilerec.planner import EmbeddingShardingPlanner, ParameterConstraints, Tiling, Topology, explicit


def hot_rows(
    name: str, rows: int, dim: int, ranks: Sequence[int] | None, topology: Topology, *, hot: int = 64
) -> Tiling:
    """Place the first `hot` rows on each of `ranks` (None: all), and the others in equal ranges over them."""
    owners = tuple(ranks) if ranks is not None else tuple(range(topology.world_size))
    hot = min(hot, rows)
    tiles: list[tuple[int, int, int, int, Sequence[int]]] = [(0, hot, 0, dim, owners)]
    size = -(-(rows - hot) // len(owners))
    for i, rank in enumerate(owners):
        tiles.append((min(hot + i * size, rows), min(hot + (i + 1) * size, rows), 0, dim, (rank,)))
    return Tiling.of(name, rows, dim, tiles)  # checks that every cell is in exactly one tile


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)  # equal initial values, under any tiling
    tables = [
        EmbeddingBagConfig(name="item", num_embeddings=5_000, embedding_dim=16, feature_names=["seen"]),
        EmbeddingBagConfig(name="user", num_embeddings=2_000, embedding_dim=16, feature_names=["user"]),
    ]
    ebc = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    return ebc


def batch(rank: int, samples: int = 32) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(rank)
    ids = (torch.rand(2 * samples, generator=draw) ** 4 * 2_000).long()  # small ids are frequent
    return KeyedJaggedTensor(["seen", "user"], ids, lengths=torch.ones(2 * samples, dtype=torch.int64))


def main(folder: str) -> float:
    """Return the largest difference, after a step, between tables under the strategy and whole ones.

    Args:
        folder: an empty folder that all ranks can write, for a checkpoint.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    whole, by_hand, planned = (collection() for _ in range(3))
    sum(whole(batch(each)).values().sum() / world for each in range(world)).backward()

    # By hand: `explicit` takes the function, and calls it with the table's size and the world.
    shard(by_hand, {"item": explicit(partial(hot_rows, hot=100)), "user": explicit(hot_rows)})
    by_hand(batch(rank)).values().sum().backward()

    # In a plan: pin the table. The planner prices the pin and places the other tables around it.
    topology = Topology(world)
    item = hot_rows("item", 5_000, 16, None, topology, hot=100)
    planner = EmbeddingShardingPlanner(topology, constraints={"item": ParameterConstraints(sharding=item)})
    shard(planned, planner.collective_plan(planned))
    if rank == 0:
        print(planned.plan)

    # A checkpoint holds whole tables, so a collection under any plan loads it.
    state = {"tables": by_hand.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    loaded = {"tables": planned.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    planned.load_state_dict(loaded["tables"])

    found, expected = full_state_dict(planned), whole.state_dict()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"largest difference from whole tables: {main(sys.argv[1]):g}")
    dist.destroy_process_group()
