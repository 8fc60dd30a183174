"""The cost of managed collision in a training step: mapping a batch's ids, counting, and resetting evicted rows.

    python benchmarks/managed_step.py [--batch 4096] [--bag 20] [--dim 16]

The claim: the module is as fast as its op. On one thread it maps more than 5 million ids a second, with hits as with
evictions. Ids are drawn by Zipf's law (exponent 1.05) of 2 million, spread over 64 bits. Tables have space for a part
of them; the smaller the table, the more rows are evicted. Before a figure is printed, the rows of its last batch are
compared with `inspect`, and distinct live ids must have distinct rows. Medians over batches.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, apply_optimizer_in_backward
from tilerec.modules import (
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
)

BUCKETS, IDS, EXPONENT, WARM, TIMED = 768, 2_000_000, 1.05, 10, 30


def batches(batch: int, bag: int) -> list[KeyedJaggedTensor]:
    uniform = torch.rand(WARM + TIMED, batch * bag, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rank = ((uniform * (IDS ** (1 - EXPONENT) - 1) + 1) ** (1 / (1 - EXPONENT))).long()
    lengths = torch.full((batch,), bag)
    return [KeyedJaggedTensor(["f"], ids * 0x1E3779B97F4A7C15 - 7, lengths=lengths) for ids in rank]


def median(run: Callable[[KeyedJaggedTensor], object], parts: list[KeyedJaggedTensor]) -> float:
    times = []
    for part in parts:
        begun = time.perf_counter()
        run(part)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def check(users: ManagedCollisionEmbeddingBagCollection, part: KeyedJaggedTensor) -> None:
    remapped = users.eval()(part)[1]
    assert remapped is not None
    rows = dict(zip(part.values().tolist(), remapped.values().tolist(), strict=True))
    live = {id_: row for id_, row in list(rows.items())[:2000] if users.inspect("f", id_).row is not None}
    assert all(users.inspect("f", id_).row == row for id_, row in live.items())
    assert len(set(live.values())) == len(live) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--bag", type=int, default=20)
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts, size = batches(options.batch, options.bag), options.batch * options.bag
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread; {size} ids a batch")
    for rows in (BUCKETS * 1024, BUCKETS * 256, BUCKETS * 64):
        config = EmbeddingBagConfig(rows, options.dim, "t", feature_names=["f"])
        ids = HashZchManagedCollisionModule(rows, "cpu", BUCKETS, eviction_policy_name="LRU_EVICTION")
        collection = ManagedCollisionCollection({"t": ids}, [config])
        users = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection([config]), collection, True)
        apply_optimizer_in_backward(torch.optim.Adagrad, users.parameters(), {"lr": 0.1})

        def step(part: KeyedJaggedTensor, users: ManagedCollisionEmbeddingBagCollection = users) -> None:
            users(part)[0].values().sum().backward()

        for _ in range(2):
            median(step, parts[:WARM])
        before = users.stats()["t"].total.evictions
        whole = median(step, parts[WARM:])
        evicted = (users.stats()["t"].total.evictions - before) / (TIMED * size)
        mapped = median(lambda part, users=users: users._remap(part, True), parts[WARM:])  # type: ignore[misc]
        check(users, parts[-1])
        print(
            f"{rows:8,} rows, {evicted:5.1%} of ids take another's row: mapped {size / mapped / 1e6:5.1f} M ids/s, "
            f"whole step {size / whole / 1e6:5.1f} M ids/s"
        )


if __name__ == "__main__":
    main()
