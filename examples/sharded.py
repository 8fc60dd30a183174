"""Train two tables that are sharded over all ranks, with a dense head whose gradients are averaged over the ranks.

torchrun --nproc-per-node 2 examples/sharded.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, shard
from tilerec.optim import RowWiseAdagrad, apply_optimizer_in_backward


def main(steps: int = 60) -> float:
    tables = [
        EmbeddingBagConfig(name="user", num_embeddings=10_000, embedding_dim=16, feature_names=["user"]),
        EmbeddingBagConfig(name="item", num_embeddings=50_000, embedding_dim=16, feature_names=["seen"]),
    ]
    ebc = EmbeddingBagCollection(tables=tables, device="meta")  # no rank ever holds a whole table
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    shard(ebc)  # from here on each rank has its tiles; plan= chooses them, or else the planner
    head = DistributedDataParallel(torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    if dist.get_rank() == 0:
        print(ebc.plan)

    draw = torch.Generator().manual_seed(dist.get_rank())  # every rank reads its own samples
    for step in range(steps):
        ids = torch.randint(0, 1_000, (2 * 256,), generator=draw)
        features = KeyedJaggedTensor(["user", "seen"], ids, lengths=torch.ones(2 * 256, dtype=torch.int64))
        clicked = ((ids[:256] % 3 == 0) | (ids[256:] % 5 == 0)).float()
        logits = head(ebc(features).values()).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, clicked)
        optimizer.zero_grad()
        loss.backward()  # gradients travel to the rows' owners, which update the rows
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step:3d}  loss on rank 0 {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
