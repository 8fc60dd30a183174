"""A training step of a sharded DLRM: eager, compiled with its graphs cut at the tables, and compiled as one graph.

    python benchmarks/compiled_step.py [--backend inductor] [--ranks 2] [--batches 256,2048] [--rounds 9] [--steps 10]

Each rank is a process with one thread, over gloo. The variants are twins of one model, train on the same batches, and
take turns within a round; the order changes from round to round. A time is the median over rounds of the slowest rank's
mean step, in ms. "cpu" is the mean over ranks of the processor time of a step, which depends less on other load. A
ratio is the median of the rounds' own ratios to eager.

A step is forward, backward with the update of the tables (row-wise Adagrad), and SGD on the dense part. Before it is
timed, each variant trains on batches of several sizes, and its losses must equal eager's within 1e-5. "graphs" and
"breaks" are those of rank 0 after these steps.

Eager products of tilerec's modules are by oneDNN where it is faster (docs/modules.md), compiled ones by MKL. `--mkl`
turns oneDNN off, so that the variants differ in the compiler only.

cut    the tables run behind `torch.compiler.disable`, as a graph break does
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from tilerec.models import DLRM
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.compiled_model import compile_model
from tilerec.parallel.shard import shard
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks

TABLES, ROWS, DIM, DENSE = 26, 100_000, 64, 13
VARIANTS = ("eager", "cut", "one graph")


def model() -> nn.Module:
    """Return this rank's part of a DLRM, tables by rows."""
    torch.manual_seed(0)
    names = [f"t{i}" for i in range(TABLES)]
    tables = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, own, feature_names=[own]) for own in names])
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
    made = DLRM(tables, DENSE, [512, 256, DIM], [512, 256, 1])
    plan: Any = {"sparse_arch.embedding_bag_collection": {own: ParameterSharding("row_wise") for own in names}}
    return shard(made, plan=plan)


class Cut(nn.Module):
    """A module that compiled programs break their graphs at."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: Any) -> Any:
        return self.inner(features)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


def batches(size: int, count: int, length: float, rank: int) -> list[tuple[Any, ...]]:
    """Return batches of dense features, ids and labels."""
    made = []
    for i in range(count):
        features = random_batch(
            [f"t{t}" for t in range(TABLES)], ROWS, size, mean_length=length, empty=0.0, exponent=1.05,
            seed=1000 * i + rank,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(i)
        labels = torch.rand(size, 1, generator=generator).round()
        made.append((torch.randn(size, DENSE, generator=generator), features, labels))
    return made


def run(sizes: list[int], length: float, rounds: int, steps: int, backend: str, mkl: bool) -> dict[str, Any]:
    """Time all variants on this rank.

    Returns:
        By batch size and variant, the mean step of each round in seconds, and its processor time.
    """
    import torch._dynamo.testing
    from torch._dynamo.utils import counters

    if mkl:
        torch.backends.mkldnn.set_flags(False)
    rank = dist.get_rank()
    forwards, optimizers, found = {}, {}, {}
    for variant in VARIANTS:
        twin: Any = model()
        if variant == "cut":
            twin.sparse_arch.embedding_bag_collection = Cut(twin.sparse_arch.embedding_bag_collection)
        dense = [p for name, p in twin.named_parameters() if "embedding_bags" not in name]
        optimizers[variant] = torch.optim.SGD(dense, lr=0.01)
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        found[variant] = counter
        options = {} if variant == "one graph" else {"fullgraph": False}
        forwards[variant] = twin if variant == "eager" else compile_model(twin, backend=counter, **options)

    def step(variant: str, batch: tuple[Any, ...]) -> float:
        dense_BI, features, labels = batch
        optimizers[variant].zero_grad()
        logits = forwards[variant](dense_BI, features)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizers[variant].step()
        return float(loss.detach())

    breaks = {}
    for variant in VARIANTS:
        counters.clear()
        losses = [step(variant, batch) for size in (64, 96, 33) for batch in batches(size, 1, length, rank)]
        breaks[variant] = sum(counters["graph_break"].values())
        if variant == "eager":
            want = losses
        worst = max(abs(a - b) for a, b in zip(losses, want, strict=True))
        assert worst < 1e-5, (variant, losses, want)
    times: dict[Any, list[tuple[float, float]]] = {}
    for size in sizes:
        own = batches(size, steps, length, rank)
        for variant in VARIANTS:
            for batch in own[:3]:
                step(variant, batch)
        for turn in range(rounds):
            order = [VARIANTS[(turn + k) % len(VARIANTS)] for k in range(len(VARIANTS))]
            for variant in order:
                dist.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                for batch in own:
                    step(variant, batch)
                spent = time.perf_counter() - begin, time.process_time() - cpu
                times.setdefault((size, variant), []).append((spent[0] / steps, spent[1] / steps))
    return {
        "times": times,
        "graphs": {variant: found[variant].frame_count for variant in VARIANTS},
        "breaks": breaks,
    }


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", default="256,2048")
    parser.add_argument("--length", type=float, default=1.0, help="ids per bag")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mkl", action="store_true", help="products of eager mode by MKL, as in compiled programs")
    given = parser.parse_args()
    sizes = [int(size) for size in given.batches.split(",")]
    with Ranks(given.ranks, timeout_s=3600.0) as ranks:
        found = ranks.run(run, sizes, given.length, given.rounds, given.steps, given.backend, given.mkl)
    print(f"{'batch':>6} {'variant':>10} {'ms':>8} {'ratio':>6} {'cpu ms':>8} {'ratio':>6} {'graphs':>7} {'breaks':>7}")
    for size in sizes:
        walls, works = {}, {}
        for variant in VARIANTS:
            rounds = list(zip(*[one["times"][size, variant] for one in found], strict=True))
            walls[variant] = [max(wall for wall, _ in own) for own in rounds]
            works[variant] = [sum(work for _, work in own) / len(own) for own in rounds]
        for variant in VARIANTS:
            numbers = "".join(
                f" {1000 * statistics.median(own[variant]):>8.1f} {_ratio(own[variant], own['eager']):>6.3f}"
                for own in (walls, works)
            )
            print(f"{size:>6} {variant:>10}{numbers} {found[0]['graphs'][variant]:>7} {found[0]['breaks'][variant]:>7}")


def _ratio(some: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    main()
