"""The ranks of a run, as the train loop sees them.

A run in one process is a world of one without a group, and nothing here does anything in it. On several ranks

    tables                cut into tiles, as the plan says; their updates happen in the backward pass
    everything else       whole on every rank; torch's `DistributedDataParallel` averages its gradients
    batches               cut into shares (`share.py`); the loss is scaled, so that updates are those of one process
    numbers to report     summed over ranks; predictions gathered, so AUC is exact

Legend: N samples of all ranks, n of this one, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tilerec.comms.agree import agree
from tilerec.comms.process import ProcessGroupComms
from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.errors import CommsError
from tilerec.parallel.data_parallel import table_parameters
from tilerec.parallel.shard import shard
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.spec.plan import ShardingPlan
from tilerec.torch_private import ignore_in_ddp
from tilerec.train.config import ParallelConfig, RunConfig
from tilerec.train.evaluate import predict
from tilerec.train.optimizers import attach, tables_of
from tilerec.train.override import settings
from tilerec.train.share import Share, shares


@final
class World:
    """This process among the ranks of a run.

    Args:
        group: the ranks; None for a run in one process.
    """

    def __init__(self, group: ProcessGroupComms | None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size

    def check(self, config: RunConfig) -> None:
        """Refuse ranks with different settings, naming the first that differs."""
        if self._group is not None:
            # Logs are rank 0's business, and their folder is named after the second a process began.
            same = {name: value for name, value in settings(config).items() if name != "log_dir"}
            agree(self._group, "the run", same)

    def build(self, config: RunConfig, dataset: Dataset, device: torch.device) -> nn.Module:
        """The model with its embedding optimizer attached; on ranks, with this rank's tiles of the tables.

        Tables are built on meta there, so a rank's memory is that of its tiles.
        """
        if self._group is None:
            model = config.model.build(dataset, device)
            attach(model, config.train.embedding_optimizer)
            return model
        model = config.model.build(dataset, device, torch.device("meta"))
        # Before planning, which counts the optimizer's state.
        attach(model, config.train.embedding_optimizer)
        plan = _plan(model, config.parallel, self._group)
        return shard(model, plan=plan, mesh=self._group, device=device, exact=config.parallel.exact)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """What to call in a training step: averages the gradients of all parameters but the tables'."""
        if self._group is None:
            return model
        tables = table_parameters(model)
        if not any(p.requires_grad for name, p in model.named_parameters() if name not in tables):
            return model
        ignore_in_ddp(model, sorted(tables))
        return DistributedDataParallel(
            model, process_group=self._group.process_group, gradient_as_bucket_view=True
        )

    def train_shares(self, config: RunConfig, dataset: Dataset, epoch: int) -> Iterator[Share]:
        """This rank's share of each global batch of a pass."""
        batch_size = config.train.batch_size
        if self.size == 1:
            return shares(dataset.train(batch_size, epoch), 0, 1)
        return config.data.train_shares(dataset, batch_size, epoch, self.rank, self.size)

    def mean(self, total: Tensor) -> Tensor:
        """Each rank's number, averaged over ranks, on every rank. All ranks call it."""
        if self.size == 1 or self._group is None:
            return total
        return self._group.all_reduce_("mean", total.clone().reshape(1)).wait().reshape(()) / self.size

    def gathered(self, name: str, tensor_n: Tensor) -> Tensor:
        """Every rank's 1-D tensor, one after the other, on every rank and on the CPU. All ranks call it."""
        group = self._group
        if self.size == 1 or group is None:
            return tensor_n.cpu()
        mine = tensor_n.to(group.device)
        size_W = torch.full((group.size,), mine.numel(), dtype=torch.int64, device=group.device)
        sizes_W, ones = torch.zeros_like(size_W), [1] * group.size
        sizes = group.all_to_all(f"sizes of {name}", sizes_W, size_W, ones, ones).wait().tolist()
        received = torch.zeros(sum(sizes), dtype=mine.dtype, device=group.device)
        copies = mine.repeat(group.size)
        group.all_to_all(name, received, copies, sizes, [mine.numel()] * group.size).wait()
        return received.cpu()

    def predict(
        self, model: nn.Module, dataset: Dataset, batch_size: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Probabilities float64 [N] and labels float32 [N] of the held-out part, in its order, on every rank.

        Each rank predicts its share of every batch. All ranks call it.
        """
        if self.size == 1 or self._group is None:
            return predict(model, dataset.held_out(batch_size), device)
        places = [torch.zeros(0, dtype=torch.int64)]

        def own() -> Iterator[Batch]:
            for share in shares(dataset.held_out(batch_size), self.rank, self.size):
                places.append(torch.arange(share.batch.batch_size) + share.first)
                yield share.batch

        predictions_n, labels_n = predict(model, own(), device)
        place_N = self.gathered("places", torch.cat(places))
        in_order = []
        for name, tensor_n in (("predictions", predictions_n), ("labels", labels_n)):
            tensor_N = self.gathered(name, tensor_n)
            in_order.append(torch.zeros_like(tensor_N).index_copy_(0, place_N, tensor_N))
        return in_order[0], in_order[1]

    def abort(self, error: BaseException) -> None:
        """This rank has failed: the others are not to wait for it."""
        if self._group is not None and not isinstance(error, CommsError):
            self._group.abort(error)


def _plan(model: nn.Module, config: ParallelConfig, group: ProcessGroupComms) -> ShardingPlan | None:
    """What `shard` is given; None leaves everything to the planner."""
    if config.plan:
        return ShardingPlan.load(config.plan)
    if config.sharding == "planned":
        return None
    limits = ParameterConstraints(sharding_types=[config.sharding])
    constraints = {table.config.name: limits for table in tables_of(model)}
    if not constraints:
        return None
    return EmbeddingShardingPlanner(constraints=constraints).collective_plan(model, pg=group)
