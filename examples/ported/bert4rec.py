"""A small BERT4Rec on random histories, with TorchRec's imports: an `EmbeddingCollection` below a transformer.

python -m tilerec.compat.torchrec examples/ported/bert4rec.py
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter


def waves(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.sin(torch.arange(weight.shape[-1], device=weight.device)).mul(0.2).expand_as(weight))


class Block(nn.Module):
    """Attention among the items of a history, and two layers."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.first(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(dim // self.heads)).masked_fill(~mask, -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class BERT4Rec(nn.Module):
    """Scores of all items at every place of a history."""

    def __init__(self, vocab_size: int, max_len: int, dim: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.max_len, self.dim = max_len, dim
        config = EmbeddingConfig(
            name="item_embedding", embedding_dim=dim, num_embeddings=vocab_size, feature_names=["item"], init_fn=waves
        )
        self.ec = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.positions = nn.Parameter(torch.zeros(max_len, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.scores = nn.Linear(dim, vocab_size)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        items: JaggedTensor = self.ec(features)["item"]
        x = torch.ops.fbgemm.jagged_2d_to_dense(
            values=items.values(), offsets=items.offsets(), max_sequence_length=self.max_len
        )
        lengths = items.lengths()
        mask = (torch.arange(self.max_len)[None, :] < lengths[:, None])[:, None, None, :]
        x = x + self.positions
        for block in self.blocks:
            x = block(x, mask)
        return self.scores(x)


def batches(count: int, size: int, vocab: int, max_len: int, seed: int):
    """Histories in which each item is the one before plus one; a third of the items are masked (id 0)."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(2, max_len + 1, (size,), generator=draw)
        starts = torch.randint(1, vocab, (size,), generator=draw)
        ids = [(start + torch.arange(n)) % (vocab - 1) + 1 for start, n in zip(starts, lengths.tolist(), strict=True)]
        labels = torch.zeros(size, max_len, dtype=torch.int64)
        for i, own in enumerate(ids):
            labels[i, : len(own)] = own
        values = torch.cat(ids)
        hidden = torch.rand(len(values), generator=draw) < 0.33
        kept = torch.where(hidden, 0, values)
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        shown = torch.ops.fbgemm.jagged_1d_to_dense(
            values=hidden.long(), offsets=offsets, max_sequence_length=max_len, padding_value=0
        )
        yield KeyedJaggedTensor.from_lengths_sync(["item"], kept, lengths), labels * shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab-size", type=int, default=100)
    parser.add_argument("--num-batches", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    device, max_len = torch.device("cpu"), 12
    torch.manual_seed(0)
    model = BERT4Rec(args.vocab_size, max_len, dim=16, heads=2, blocks=2)
    torch.manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    sharders = [EmbeddingCollectionSharder(fused_params={"learning_rate": 0.05})]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={"item_embedding": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adam(params, lr=3e-3)
    )
    optimizer = CombinedOptimizer([("fused", model.fused_optimizer), ("dense", dense)])
    data = batches(args.num_batches, 32, args.vocab_size, max_len, seed=dist.get_rank())
    for step, (features, labels) in enumerate(data):
        optimizer.zero_grad()
        scores = model(features)
        loss = F.cross_entropy(scores.reshape(-1, args.vocab_size), labels.reshape(-1), ignore_index=0)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
