"""Train on ids of any 64 bits, more of them than rows: the longest unused ids are evicted. Runs on any number of ranks.

torchrun --nproc-per-node 2 examples/managed_collision.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, shard
from tilerec.modules import (
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
)
from tilerec.optim import RowWiseAdagrad, apply_optimizer_in_backward


def main(steps: int = 60) -> float:
    table = EmbeddingBagConfig(name="user", num_embeddings=1536, embedding_dim=16, feature_names=["user"])
    ids = HashZchManagedCollisionModule(
        zch_size=1536, device="cpu", total_num_buckets=24, eviction_policy_name="LRU_EVICTION"
    )
    tables = EmbeddingBagCollection([table])
    users = ManagedCollisionEmbeddingBagCollection(tables, ManagedCollisionCollection({"user": ids}, [table]))
    apply_optimizer_in_backward(RowWiseAdagrad, users.parameters(), {"lr": 0.3})
    shard(users)  # the plan distributes rows over the ranks; ids are distributed in whole buckets
    head = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)

    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        # The set of active users changes: 1,000 at a time. Their numbers are too large to index a table.
        person = 20 * step + torch.randint(0, 1000, (256,), generator=draw)
        batch = KeyedJaggedTensor(["user"], person * 7919**4 - 2**62, lengths=torch.ones(256, dtype=torch.int64))
        pooled, _ = users(batch)
        loss = binary_cross_entropy_with_logits(head(pooled.values()).squeeze(1), (person % 3 == 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step:3d}  loss on rank 0 {loss.item():.4f}")

    stats = users.stats()["user"]  # of all ranks
    chosen = [int(batch.values()[0])]
    dist.broadcast_object_list(chosen)  # all ranks must inspect the same id
    place = users.inspect("user", chosen[0])
    if dist.get_rank() == 0:
        print(stats)
        print(f"id {place.id} has row {place.row}, on rank {place.rank}; {place.how}")
    return stats.occupancy


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
