"""Two towers on random pairs of a user and an item, with TorchRec's imports and a model of its own.

python -m tilerec.compat.torchrec examples/ported/two_tower.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.datasets.movielens import DEFAULT_RATINGS_COLUMN_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def constant_rows(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.sin(torch.arange(weight.shape[-1], device=weight.device)).mul(0.1).expand_as(weight))


class TwoTower(nn.Module):
    """A tower of layers over the embedding of each feature."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, layer_sizes: list[int]) -> None:
        super().__init__()
        user, item = embedding_bag_collection.embedding_bag_configs()
        self._user, self._item = user.feature_names[0], item.feature_names[0]
        self.ebc = embedding_bag_collection
        self.query_proj = MLP(in_size=user.embedding_dim, layer_sizes=layer_sizes)
        self.candidate_proj = MLP(in_size=item.embedding_dim, layer_sizes=layer_sizes)

    def forward(self, kjt: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(kjt)
        return self.query_proj(pooled[self._user]), self.candidate_proj(pooled[self._item])


class TwoTowerTrainTask(nn.Module):
    """The loss of the dot product of the towers' outputs."""

    def __init__(self, two_tower: TwoTower) -> None:
        super().__init__()
        self.two_tower = two_tower

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        query, candidate = self.two_tower(batch.sparse_features)
        logits = (query * candidate).sum(dim=1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-embeddings", type=int, default=500)
    parser.add_argument("--num-batches", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    features = DEFAULT_RATINGS_COLUMN_NAMES[:2]
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=16, num_embeddings=args.num_embeddings, feature_names=[name],
            init_fn=constant_rows,
        )
        for name in features
    ]  # fmt: skip
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    task = TwoTowerTrainTask(TwoTower(ebc, layer_sizes=[32, 8]))
    torch.manual_seed(1)
    for layer in task.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.05})
    model = DistributedModelParallel(module=task, device=device)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adam(params, lr=0.01)
    )
    batches = RandomRecDataset(
        keys=features, batch_size=128, hash_size=args.num_embeddings, ids_per_feature=1, num_dense=0,
        manual_seed=dist.get_rank(), num_batches=args.num_batches,
    )  # fmt: skip
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    iterator = iter(batches)
    for step in range(args.num_batches):
        loss, _, _ = pipeline.progress(iterator)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
