"""Train a DLRM in `DistributedModelParallel`, with a different batch on every rank.

torchrun --nproc-per-node 2 examples/sharded_dlrm.py

Rank r reads batches r, r + W, r + 2 W, … of the stream, so some ranks run out of batches before others. `even_batches`
keeps them in step. `tilerec train synthetic --nproc 2` does the same with evaluation, logs and a progress bar.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from tilerec import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig
from tilerec.comms.mesh import group_of
from tilerec.data import PowerLawFeature, SyntheticClicks
from tilerec.metrics import auc
from tilerec.models import DLRM
from tilerec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tilerec.parallel.uneven_batches import even_batches
from tilerec.train import click_loss


def main(train_rows: int = 100_500, batch_size: int = 512, dim: int = 16) -> float:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    clicks = SyntheticClicks(
        [PowerLawFeature(f"f{i}", num_rows=20_000, max_length=3) for i in range(6)],
        train_rows=train_rows,
        held_out_rows=1 << 12,
    )
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature.name}",
            num_embeddings=feature.num_rows,
            embedding_dim=dim,
            feature_names=[feature.name],
        )
        for feature in clicks.sparse_features
    ]
    ebc = EmbeddingBagCollection(tables=tables, device="meta")
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(DLRM(ebc, len(clicks.dense_features), [32, dim], [64, 32, 1]))
    # Parameters without an attached optimizer are dense: whole on every rank, with gradients averaged over the ranks.
    attached = set(model.fused_optimizer.params)
    optimizer = torch.optim.Adam((p for name, p in model.named_parameters() if name not in attached), lr=2e-3)

    own = itertools.islice(clicks.train(batch_size), rank, None, world_size)
    empty = clicks.batch(0, 0)
    for step, turn in enumerate(even_batches(own, group_of(), empty)):
        logits = model(turn.batch.dense_features, turn.batch.sparse_features)
        # Scaled so that the averaged gradient is that of the mean over all samples of this step on all ranks.
        loss = click_loss(logits, turn.batch.labels, global_batch=turn.total, world_size=world_size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(f"step {step:4d}  loss on rank 0 {loss.item():.4f}")

    # Every rank must take part in every lookup. Here all ranks read the same batches.
    model.eval()
    with torch.no_grad():
        pairs = [
            (model(batch.dense_features, batch.sparse_features).reshape(-1).sigmoid(), batch.labels)
            for batch in clicks.held_out(batch_size)
        ]
    reached = auc(*(torch.cat(column) for column in zip(*pairs, strict=True))).item()
    if rank == 0:
        print(f"held-out AUC {reached:.4f}\n{model.plan}\n{model.traffic()}")
    return reached


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
