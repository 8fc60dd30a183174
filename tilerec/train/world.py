"""Distribution of a run over ranks, for the training loop.

A run in one process is a world of size one without a group; the functions here then do not communicate. On several
ranks:

    tables                sharded into tiles by the plan; the backward pass updates them
    other parameters      replicated on every rank; torch's `DistributedDataParallel` averages their gradients
    batches               divided into shares (`data/share.py`); a scaled loss gives the same updates as one process
    reported numbers      summed over ranks; predictions are gathered, so AUC is exact

Legend: N samples of all ranks, n of this one, W ranks, T tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tilerec.comms.agreement import agree, digest
from tilerec.comms.process import ProcessGroupComms
from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.data.share import shares
from tilerec.errors import CommsError, ConfigError
from tilerec.parallel.data_parallel import table_parameters
from tilerec.stop_signals import RunStopped
from tilerec.torch_private import fix_ddp_buckets, ignore_in_ddp
from tilerec.train.config import RunConfig
from tilerec.train.evaluate import Predictions, predict
from tilerec.train.optimizers import attach
from tilerec.train.override import settings
from tilerec.train.run_plan import Plan, shard_run


@final
class World:
    """This process's view of the ranks of a run.

    Args:
        group: the ranks; None for a run in one process.
    """

    def __init__(self, group: ProcessGroupComms | None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size

    @property
    def group(self) -> ProcessGroupComms | None:
        """The ranks; None for a run in one process."""
        return self._group

    def check(self, config: RunConfig) -> None:
        """Raise if the ranks' settings differ, and name the first one that does."""
        if self._group is not None:
            # Only rank 0 writes logs, and the folder's default name is the second in which a process started.
            same = {name: value for name, value in settings(config).items() if name != "log_dir"}
            agree(self._group, "the run", same)

    def check_data(self, dataset: Dataset) -> None:
        """Raise if the ranks have opened other samples, where the data set compares them. Collective."""
        own = digest("the first samples", dataset.fingerprint)
        found = [own] if self._group is None else self._group.all_gather_object(own)
        others = [rank for rank, one in enumerate(found) if one != found[0]]
        if others:
            raise ConfigError(
                f"data: got other first samples on rank {others[0]} than on rank 0; expected the same data set on "
                "every rank, because tilerec deals its samples to the ranks. Remove the division by rank from it."
            )

    def build(self, config: RunConfig, dataset: Dataset, device: torch.device, saved: Plan = None) -> nn.Module:
        """Return the model with its embedding optimizer attached; with a group, with this rank's tiles of the tables.

        With a group, tables are built on meta, so a rank allocates memory only for its tiles.

        Args:
            saved: plan of a run that is continued on the same ranks and hosts.
        """
        if self._group is None:
            model = config.model.build(dataset, device)
            attach(model, config.train.embedding_optimizer)
            return model
        model = config.model.build(dataset, device, torch.device("meta"))
        # Attach before planning, because the planner counts the optimizer's state.
        attach(model, config.train.embedding_optimizer)
        shard_run(model, config.parallel, self._group, device, saved)
        return model

    def data_parallel(self, model: nn.Module, *, fixed_order: bool = False) -> nn.Module:
        """Return the module to call in a training step, which averages the gradients of all but the tables.

        Args:
            fixed_order: the first step of a process has the roundings of all others, so a run that continues has the
                bits of one that did not stop. With several buckets of gradients, less of their exchange overlaps.
        """
        if self._group is None:
            return model
        tables = table_parameters(model)
        if not any(p.requires_grad for name, p in model.named_parameters() if name not in tables):
            return model
        # Buffers stay each rank's own: those of managed collision hold the ids of its own tiles.
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        ignore_in_ddp(model, sorted(tables | buffers))
        wrapped = DistributedDataParallel(model, process_group=self._group.process_group, gradient_as_bucket_view=True)
        if fixed_order and self.size > 2:  # sums of two are the same in any order
            fix_ddp_buckets(wrapped)
        return wrapped

    def mean(self, total: Tensor) -> Tensor:
        """Return the mean of the ranks' numbers, on every rank. Collective."""
        if self.size == 1 or self._group is None:
            return total
        return self._group.all_reduce_("mean", total.clone().reshape(1)).wait().reshape(()) / self.size

    def sum(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, on every rank's CPU. Collective."""
        if self.size == 1 or self._group is None:
            return tensor.cpu()
        total = tensor.to(self._group.device).clone().contiguous()
        return self._group.all_reduce_(name, total).wait().cpu()

    def gathered(self, name: str, tensor_n: Tensor) -> Tensor:
        """Return the concatenated 1-D tensors of all ranks, on every rank's CPU. Collective."""
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

    def predict(self, model: nn.Module, batches: Iterable[Batch], device: torch.device, tasks: int = 1) -> Predictions:
        """Return the predictions on batches, in their order, on every rank.

        Each rank predicts its share of every batch. Collective: every rank passes the same batches.

        Args:
            tasks: number of tasks of the labels.
        """
        if self.size == 1 or self._group is None:
            return predict(model, batches, device)
        places = [torch.zeros(0, dtype=torch.int64)]

        def own() -> Iterator[Batch]:
            for share in shares(batches, self.rank, self.size):
                places.append(torch.arange(share.batch.batch_size) + share.first)
                yield share.batch

        found = predict(model, own(), device)
        place_N = self.gathered("places", torch.cat(places))
        shape = (-1, tasks) if tasks > 1 else (-1,)
        in_order: list[Tensor | None] = []
        for name, tensor_n in zip(found._fields, found, strict=True):
            if tensor_n is None:
                in_order.append(None)
                continue
            tensor_N = self.gathered(name, tensor_n.reshape(-1))
            tensor_N = tensor_N if name == "weights" else tensor_N.view(shape)
            in_order.append(torch.zeros_like(tensor_N).index_copy_(0, place_N, tensor_N))
        probabilities, labels, weights = in_order
        assert probabilities is not None
        assert labels is not None
        return Predictions(probabilities, labels, weights)

    def reporting(self, where: Callable[[], str]) -> AbstractContextManager[object]:
        """Return a context in which the other ranks can read what this rank does; see `ProcessGroupComms.reporting`."""
        return nullcontext() if self._group is None or self.size == 1 else self._group.reporting(where)

    def failure(self, title: str, error: RuntimeError) -> RuntimeError:
        """Return the error, or what it means if torch has lost a rank in a collective of its own."""
        return error if self._group is None else self._group.failure(title, error)

    def abort(self, error: BaseException) -> None:
        """Report a failure of this rank to the others, so that they do not wait for it."""
        if self._group is not None and not isinstance(error, (CommsError, RunStopped)):  # all have saved
            self._group.abort(error)
