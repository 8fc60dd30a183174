"""Pipelines beside the plain loop: steps over a slow link, and the overhead where nothing overlaps.

    python benchmarks/pipelines.py            # both parts, minutes
    python benchmarks/pipelines.py link       # 2 processes; every message of a route takes --link ms
    python benchmarks/pipelines.py overhead   # 1 process, unsharded; and 2 processes over a fast link

Link: a message of a route arrives at the earliest `--link` ms after both ranks have sent it; the ranks may compute
meanwhile, as over a real link. A step's dense part computes for `--compute` ms of wall time, half of it in the
backward, so the figures hold on a busy machine, too. A route is two messages, so the plain loop pays compute + 2 links.

Overhead: steps of the plain loop and of a pipeline alternate, on twin models and equal batches; medians, and CPU time.
The same with a model that computes nothing shows a pipeline's own time, which is too short for a difference of whole
steps on a machine whose speed changes; "of a step" is its part of the plain loop's step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.comms.process import ProcessGroupComms
from tilerec.data.batch import Batch
from tilerec.models.dlrm import DLRM, DLRMTrain
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.pipelines import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from tilerec.planner import row_wise
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing import random_batch, run_ranks

CPU = torch.device("cpu")
KEYS = [f"f{k}" for k in range(8)]
PIPELINES = [
    TrainPipelineBase, TrainPipelineSparseDistLite, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist
]  # fmt: skip


class SlowGroup:
    """A group whose all-to-alls take at least some time."""

    def __init__(self, group: Any, seconds: float) -> None:
        self._group, self._seconds = group, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_to_all(self, *args: Any) -> Any:
        return SlowHandle(self._group.all_to_all(*args), time.perf_counter() + self._seconds)


class SlowHandle:
    """A call that ends after a point in time."""

    def __init__(self, handle: Any, end: float) -> None:
        self._handle, self._end = handle, end

    def wait(self) -> Tensor:
        result = self._handle.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return result

    def is_done(self) -> bool:
        return time.perf_counter() >= self._end and bool(self._handle.is_done())


class Busy(torch.autograd.Function):
    """Computes for some time, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        compute(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        compute(ctx.seconds)
        return grad, None


def compute(seconds: float) -> None:
    """Multiply matrices until the time is over."""
    end, matrix = time.perf_counter() + seconds, torch.ones(32, 32)
    while time.perf_counter() < end:
        matrix @ matrix


class BusyModel(nn.Module):
    """A model with a dense part that computes for some time."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__()
        self.model, self._seconds = model, seconds

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        loss, output = self.model(batch)
        return Busy.apply(loss, self._seconds / 2), output


class IdleModel(nn.Module):
    """A model that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        return self.weight.sum(), batch


def built(group: Any, rows: int, seconds: float) -> nn.Module:
    """A DLRM with 8 tables, sharded by rows over a group."""
    torch.manual_seed(0)
    tables = EmbeddingBagCollection([EmbeddingBagConfig(rows, 64, f"t{key}", feature_names=[key]) for key in KEYS])
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
    model: nn.Module = DLRMTrain(DLRM(tables, 13, [256, 64], [256, 128, 1]))
    if group is not None:
        shard(model, plan=row_wise(), mesh=group)
    return BusyModel(model, seconds) if seconds else model


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD for the dense part."""
    return torch.optim.SGD([p for name, p in model.named_parameters() if "embedding" not in name], lr=0.01)


def batches(count: int, size: int, rows: int, rank: int) -> list[Batch]:
    """Random batches."""
    features = [random_batch(KEYS, rows, size, mean_length=2, seed=99 * rank + k) for k in range(count)]
    return [Batch(torch.randn(size, 13), one, torch.ones(size)) for one in features]


def plain_step(model: nn.Module, optimizer: Any) -> Callable[[Iterator[Batch]], None]:
    """One step of the plain loop."""

    def step(iterator: Iterator[Batch]) -> None:
        optimizer.zero_grad()
        loss, _ = model(next(iterator))
        loss.backward()
        optimizer.step()

    return step


def cycled(made: list[Batch]) -> Iterator[Batch]:
    """The batches, for ever."""
    while True:
        yield from made


def timed(steps: dict[str, Callable[[Any], Any]], made: list[Batch], count: int) -> dict[str, tuple[float, float]]:
    """Median wall time and CPU time per step in ms; the loops alternate step by step."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    sources = {name: cycled(made) for name in steps}
    for n in range(count + 5):
        for name, step in steps.items():
            start, own = time.perf_counter(), time.process_time()
            step(sources[name])
            if n >= 5:
                wall[name].append(1e3 * (time.perf_counter() - start))
                cpu[name].append(1e3 * (time.process_time() - own))
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in steps}


def with_link(compute_ms: float, link_ms: float, count: int) -> dict[str, tuple[float, float]]:
    """Steps of one rank over a slow link."""
    group = ProcessGroupComms()
    made = batches(8, 64, 1000, group.rank)

    def model_of(slow: bool, seconds: float) -> nn.Module:
        model = built(group, 1000, seconds)
        for module in model.modules():
            if slow and isinstance(module, EmbeddingBagCollection):
                router = module.exchange.stages(torch.float32).router  # type: ignore[attr-defined]
                router.group = SlowGroup(router.group, link_ms / 1e3)
        return model

    steps: dict[str, Callable[[Any], Any]] = {}
    for name, slow in (("plain loop, fast link", False), ("plain loop", True)):
        model = model_of(slow, compute_ms / 1e3)
        steps[name] = plain_step(model, dense_optimizer(model))
    for make in PIPELINES:
        model = model_of(True, compute_ms / 1e3)
        steps[make.__name__] = make(model, dense_optimizer(model), CPU).progress
    # Loops alternate in blocks. A block's first steps do not count: their messages aged while the other loops ran.
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(max(count // 10, 1)):
        for name, step in steps.items():
            samples[name].append(timed({name: step}, made, 10)[name])
    return {
        name: (statistics.median(wall for wall, _ in own), statistics.median(cpu for _, cpu in own))
        for name, own in samples.items()
    }


def overhead(ranks: int, count: int) -> dict[str, tuple[float, float]]:
    """Steps with nothing to overlap."""
    group = ProcessGroupComms() if ranks > 1 else None
    made = batches(8, 1024, 20_000, 0 if group is None else group.rank)
    steps: dict[str, Callable[[Any], Any]] = {}
    model = built(group, 20_000, 0)
    steps["plain loop"] = plain_step(model, dense_optimizer(model))
    for make in PIPELINES:
        model = built(group, 20_000, 0)
        steps[make.__name__] = make(model, dense_optimizer(model), CPU).progress
    if group is not None:
        for make in (TrainPipelineBase, TrainPipelineSparseDist):
            model = built(group, 20_000, 0)
            steps[f"{make.__name__}, even=False"] = make(model, dense_optimizer(model), CPU, even=False).progress
    return timed(steps, made, count)


def own_times(count: int) -> dict[str, float]:
    """CPU time in ms that a step of each pipeline takes beyond one of the plain loop, without a model's time."""
    steps: dict[str, Callable[[Any], Any]] = {}
    for make in (None, *PIPELINES):
        model = IdleModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        name = "plain loop" if make is None else make.__name__
        steps[name] = plain_step(model, optimizer) if make is None else make(model, optimizer, CPU).progress
    found = timed(steps, batches(8, 1024, 20_000, 0), 20 * count)
    return {name: cpu - found["plain loop"][1] for name, (_, cpu) in found.items() if name != "plain loop"}


def show(title: str, found: dict[str, tuple[float, float]], base: str) -> None:
    """Print one table."""
    print(f"\n{title}\n{'':38s}{'ms/step':>10s}{'ratio':>8s}{'CPU ms':>10s}{'ratio':>8s}")
    for name, (wall, cpu) in found.items():
        ratios = wall / found[base][0], cpu / found[base][1]
        print(f"{name:38s}{wall:10.2f}{ratios[0]:8.3f}{cpu:10.2f}{ratios[1]:8.3f}")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", nargs="?", choices=["link", "overhead"])
    parser.add_argument("--compute", type=float, default=30.0, help="ms of a step's dense part")
    parser.add_argument("--link", type=float, default=20.0, help="ms of a message of a route")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    if given.part != "overhead":
        found = run_ranks(2, with_link, given.compute, given.link, given.steps, timeout_s=1000)[0]
        title = f"2 ranks, compute {given.compute:g} ms, each of a route's two messages {given.link:g} ms"
        show(title, found, "plain loop")
        alone, route = found["plain loop, fast link"][0], 2 * given.link
        for make in (TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist):
            limit = max(alone, route)
            print(f"{make.__name__}: {found[make.__name__][0] / limit:.3f} of max(step without link, route)")
    if given.part != "link":
        found = overhead(1, given.steps)
        show("1 process, unsharded, batch 1,024", found, "plain loop")
        for name, own in own_times(given.steps).items():
            print(f"{name}: {1e3 * own:.0f} us of its own, {own / found['plain loop'][1]:.2%} of a step")
        found = run_ranks(2, overhead, 2, given.steps, timeout_s=1000)[0]
        show("2 processes, row-wise, batch 1,024 each", found, "plain loop")


if __name__ == "__main__":
    main()
