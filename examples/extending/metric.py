"""A metric of your own: the Brier score, over a window of the latest steps and over all samples of all ranks.

torchrun --nproc-per-node 2 examples/extending/metric.py

    Brier score = sum w (p - y)^2 / sum w        0 is perfect, 0.25 is p = 0.5 everywhere
    Source: Brier, Verification of forecasts expressed in terms of probability, 1950.

A `Measure` maps samples to sums that add up over batches and ranks, and sums to its value. Updates add tensors on their
device, so a measure never waits for it. If sums cannot give the value, set `keeps_samples` and override `exact`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec.metrics import Measure, MetricModule


class Brier(Measure):
    """Mean squared difference between prediction and label. Shapes: T tasks, N samples, K = 2 sums."""

    name = "brier"

    def sums(self, predictions_TN: Tensor, labels_TN: Tensor, weights_TN: Tensor) -> Tensor:
        w_TN = weights_TN.double()
        loss_TN = w_TN * (predictions_TN.double() - labels_TN.double()).square()
        return torch.stack([loss_TN.sum(1), w_TN.sum(1)])

    def from_sums(self, sums_KT: Tensor) -> Tensor:
        loss_T, weight_T = sums_KT
        return loss_T / weight_T  # 0 / 0 is NaN: no samples


def samples(rank: int, count: int = 300) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    predictions = torch.rand(count, generator=draw)
    return predictions, (torch.rand(count, generator=draw) < predictions).float()


def main() -> tuple[float, float]:
    """Return the lifetime's value, and the value computed from all ranks' samples at once."""
    metrics = MetricModule(tasks=["click"], measures=["ne", Brier()], window=100)
    predictions, labels = samples(dist.get_rank())
    for part in range(0, 300, 50):
        metrics.update(predictions[part : part + 50], labels[part : part + 50])
    values = metrics.compute()  # collective: adds the sums of all ranks

    every = [samples(rank) for rank in range(dist.get_world_size())]
    p, y = (torch.cat(part).double() for part in zip(*every, strict=True))
    return values["click/brier/lifetime"].item(), (p - y).square().mean().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("Brier score {:.4f}, from all samples at once {:.4f}".format(*main()))
    dist.destroy_process_group()
