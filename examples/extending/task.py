"""A task: squared error in place of cross entropy, with its score, its progress and its predictions.

python examples/extending/task.py
torchrun --nproc-per-node 2 examples/extending/task.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilerec.comms import ProcessGroupComms
from tilerec.data import Batch, Dataset
from tilerec.data.dataset import RowDataset
from tilerec.data.share import Share
from tilerec.recipes import DLRMConfig, SyntheticData
from tilerec.spec.optimizer import Adam
from tilerec.train import Evaluation, HeldOutScores, RunConfig, Task, TaskConfig, TrainConfig, train
from tilerec.train.world import World


@dataclass(frozen=True)
class Errors(HeldOutScores):
    """Mean squared error."""

    samples: int
    mse: float

    @property
    def numbers(self) -> dict[str, float]:
        return {"mse": self.mse}

    def with_numbers(self, numbers: dict[str, float]) -> Errors:
        return Errors(self.samples, **numbers)


class SquaredError(Task):
    """Mean of (output - label)². All ranks call the methods in the same order."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks = device, ranks

    def loss(self, model: nn.Module, share: Share) -> Tensor:
        error_B = _outputs(model, share.batch) - share.batch.labels
        return error_B.square().sum() * (self._ranks / share.total)  # gradients of the ranks are averaged

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
        training = model.training
        model.eval()
        errors = [(_outputs(model, one) - one.labels).square() for one in (batch.to(self._device) for batch in batches)]
        model.train(training)
        error_N = torch.cat(errors)
        return Evaluation({"click": Errors(len(error_N), error_N.mean().item())})

    def prediction_columns(self) -> Sequence[str]:
        return ["value"]

    @torch.no_grad()
    def predict(
        self, model: nn.Module, dataset: RowDataset, keys: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, pa.Table]]:
        for batch, table in dataset.rows(batch_size, keys):
            value_B = _outputs(model, batch.to(self._device)).cpu()
            yield len(value_B), table.append_column("value", pa.array(value_B.numpy()))


def _outputs(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(batch.dense_features, batch.sparse_features).reshape(-1)
    return output


@dataclass(frozen=True)
class SquaredErrorConfig(TaskConfig):
    """In a run file: task = {kind = "my_module:SquaredErrorConfig"}."""

    def build(self, dataset: Dataset, options: TrainConfig, device: torch.device, world: World) -> SquaredError:
        return SquaredError(device, world.size)


def run() -> RunConfig:
    return RunConfig(
        name="squares",
        data=SyntheticData(num_rows=(100, 50), train_rows=20_000, held_out_rows=2_000),
        model=DLRMConfig(embedding_dim=8, dense_arch=(8,), over_arch=(16,)),
        train=TrainConfig(batch_size=256, embedding_optimizer=Adam(lr=1e-2), dense_optimizer=Adam(lr=1e-2)),
        task=SquaredErrorConfig(),
    )


def main() -> tuple[float, float]:
    """Train, in this process or on all ranks of a process group; return the error, and that of the mean label."""
    group = ProcessGroupComms() if dist.is_initialized() else None
    result = train(run(), group=group)
    label_N = torch.cat([batch.labels for batch in run().data.open().held_out(1_000)])
    return result.held_out.numbers["mse"], label_N.var(correction=0).item()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    print("held-out error {:.4f}; of the mean label {:.4f}".format(*main()))
    if dist.is_initialized():
        dist.destroy_process_group()
