"""A step of sharded tables with repeated ids sent once, beside the same step with every id sent.

    python benchmarks/distinct_ids.py [--ranks 2] [--rounds 9] [--cases sequence,bags] [--exponent 1.05]

Each rank is a process of one thread, over gloo. All models have the same plan, but for `Wire(distinct=…)`, and take
turns: once per id, by the counts of the batch (the default), always once. Messages between the ranks stay in memory, or
go through sockets with TILEREC_SHARED_MEMORY=0. A time is the median over rounds of the slowest rank's mean step of a
round, in ms; bytes are those that rank 0 sends in a step.

    sequence   8 tables x 100,000 x 64, 1,024 samples of a rank, 20 ids each, unpooled
    bags       26 tables x 100,000 x 128, 2,048 samples of a rank, one id per bag

Ids follow a Zipf law, scrambled. The forward, a backward from a given gradient, and the SGD update.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.testing import Ranks

CASES = {"sequence": (8, 64, 1024, 20), "bags": (26, 128, 2048, 1)}
"""Tables, columns, samples of a rank, ids of a sample."""
ROWS, BATCHES = 100_000, 4
WAYS: dict[str, bool | None] = {"each": False, "counts": None, "once": True}


def made_batches(case: str, rank: int, exponent: float) -> list[KeyedJaggedTensor]:
    tables, _, samples, length = CASES[case]
    generator = torch.Generator().manual_seed(7 + rank)
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -exponent
    places = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    names = [f"f{t}" for t in range(tables)]
    lengths = torch.full((tables * samples,), length)
    cumulative = (weights / weights.sum()).cumsum(0)
    found = []
    for _ in range(BATCHES):
        draws = torch.rand(tables * samples * length, generator=generator, dtype=torch.float64)
        ids = places[torch.searchsorted(cumulative, draws).clamp(max=ROWS - 1)]
        found.append(KeyedJaggedTensor(names, ids, lengths=lengths))
    return found


class Steps:
    """One model of a rank, and its steps."""

    def __init__(self, case: str, kind: ShardingType, wire: Wire) -> None:
        tables, dim, _, _ = CASES[case]
        configs = [(f"t{t}", [f"f{t}"]) for t in range(tables)]
        module: Any = (
            EmbeddingCollection([EmbeddingConfig(ROWS, dim, name, feature_names=own) for name, own in configs])
            if case == "sequence"
            else EmbeddingBagCollection(
                [EmbeddingBagConfig(ROWS, dim, name, feature_names=own) for name, own in configs]
            )
        )
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
        size = dist.get_world_size()
        plan = {
            f"t{t}": ParameterSharding(kind, ranks=[t % size] if kind is ShardingType.TABLE_WISE else None, wire=wire)
            for t in range(tables)
        }
        self.module = shard(module, plan={"": plan})
        self.grads: list[Tensor] = []

    def step(self, batch: KeyedJaggedTensor) -> int:
        self.module.exchange.group.traffic.reset()
        out = self.module(batch)
        parts = [out.values()] if not isinstance(out, dict) else [part.values() for part in out.values()]
        if not self.grads:
            self.grads = [torch.full_like(part, 1e-3) for part in parts]
        torch.autograd.backward(parts, self.grads)
        return int(self.module.exchange.group.traffic.total())


def on_rank(case: str, kind: ShardingType, rounds: int, exponent: float) -> dict[str, tuple[list[float], int]]:
    torch.set_num_threads(1)
    batches = made_batches(case, dist.get_rank(), exponent)
    models = {name: Steps(case, kind, Wire(distinct=distinct)) for name, distinct in WAYS.items()}
    found: dict[str, tuple[list[float], int]] = {name: ([], 0) for name in models}
    for number in range(rounds + 1):
        # Turns rotate, so that each model follows each other one.
        for name in [*WAYS, *WAYS][number % len(WAYS) :][: len(WAYS)]:
            model = models[name]
            dist.barrier()
            began = time.perf_counter()
            for batch in batches:
                sent = model.step(batch)
            took = torch.tensor([(time.perf_counter() - began) / len(batches)])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number:
                found[name] = ([*found[name][0], took.item() * 1e3], sent)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--exponent", type=float, default=1.05)
    options = parser.parse_args()
    with Ranks(options.ranks) as ranks:
        for case in options.cases:
            for kind in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE):
                found = ranks.run(on_rank, case, kind, options.rounds, options.exponent)[0]
                every, bytes_each = found["each"]
                for name, (times, sent) in found.items():
                    ratio = median(own / other for own, other in zip(times, every, strict=True))
                    print(
                        f"{case:8} {kind.value:10} {name:6} {median(times):8.1f} ms  {ratio:5.2f}  "
                        f"{sent / 1e6:7.2f} MB  {sent / bytes_each:5.2f}"
                    )


if __name__ == "__main__":
    main()
