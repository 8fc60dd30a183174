"""Cached tables: hit rates by cache size and policy, and the cost of the cache's bookkeeping.

    python benchmarks/cached.py [--rows 1000000] [--batch 16384] [--batches 100] [--threads 1]
        [--ratings PATH/TO/ratings.csv]

The claims:

- on skewed ids a cache of a twentieth of the rows holds half or more of the rows of a batch
- LFU holds more of them than LRU if popularity does not change
- training behind a cache gives the same bits as without one

Hit rates count distinct rows per batch (a row that occurs ten times in a batch moves once). They come from the cache's
own statistics, after as many warm-up batches as measured ones. Streams: Zipf's law over rows in random order; movies in
the order in which MovieLens' users rated them (each in 256 of the ratings a batch), where popularity does change.

Times are those of whole training steps (one table, pooled, row-wise Adagrad) with and without a cache, in turns, both
on the CPU. The cache is in host memory, too, so it only adds cost. The measured cost is that of its bookkeeping:
finding the distinct rows, choosing lines, moving rows. Outputs of every step, and all rows and state in the end, are
compared before a time is printed. Only a GPU can show the time that a cache saves by fewer reads over a slow link.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tilerec import (
    CacheAlgorithm,
    CacheParams,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    cache_tables,
    flush_caches,
)
from tilerec.ops.runtime.cpu.library import status
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.storage.cache_request import WantedRows, prefetch_all
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.row_cache import RowCache

FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DIM, BAG = 64, 8


def zipf(rows: int, count: int, exponent: float, seed: int) -> Tensor:
    """Return ids by Zipf's law, with popular ones at random places of the table."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64) * shares[-1]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return order[torch.searchsorted(shares, draws).clamp(max=rows - 1)]


def rated_movies(path: Path) -> tuple[Tensor, int]:
    """Return movies in the order of their ratings, numbered by first occurrence, and the number of movies."""
    with path.open() as file:
        pairs = sorted((int(row["timestamp"]), int(row["movieId"])) for row in csv.DictReader(file))
    number: dict[int, int] = {}
    ids = [number.setdefault(movie, len(number)) for _, movie in pairs]
    return torch.tensor(ids), len(number)


def hit_rate(ids: Tensor, rows: int, batch: int, factor: float, algorithm: CacheAlgorithm) -> float:
    """Return the hit rate of distinct rows in the second half of the batches."""
    cache, host = RowCache("t", CacheParams(algorithm, factor)), [torch.zeros(rows, 1)]
    parts = ids.split(batch)
    for number, part in enumerate(parts):
        if number == len(parts) // 2:
            cache.stats = CacheStats()
        wanted = [WantedRows(cache, host, ((0, part.numel()),))]
        prefetch_all(wanted, part)
        cache.in_flight.clear()
    return cache.stats.hit_rate


def print_hit_rates(name: str, ids: Tensor, rows: int, batch: int) -> None:
    distinct = statistics.mean([torch.unique(part).numel() for part in ids.split(batch)])
    print(f"\n{name}: {rows:,} rows, {batch:,} ids a batch, of them {distinct:,.0f} distinct")
    print("| load factor | LRU | LFU |\n|---|---|---|")
    for factor in FACTORS:
        rates = [hit_rate(ids, rows, batch, factor, algorithm) for algorithm in CacheAlgorithm]
        print(f"| {factor} | " + " | ".join(f"{100 * rate:.1f} %" for rate in rates) + " |")


def model(rows: int) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    made = EmbeddingBagCollection([EmbeddingBagConfig(rows, DIM, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), made.parameters())
    return made


def batches(ids: Tensor, batch: int) -> Iterator[KeyedJaggedTensor]:
    for part in ids.split(batch):
        lengths = torch.full((part.numel() // BAG,), BAG)
        yield KeyedJaggedTensor.from_lengths_sync(["f"], part, lengths)


def step(module: EmbeddingBagCollection, kjt: KeyedJaggedTensor) -> tuple[float, Tensor]:
    since = time.perf_counter()
    out = module(kjt).values()
    out.backward(out.detach())
    return time.perf_counter() - since, out.detach()


def print_times(rows: int, ids: Tensor, batch: int) -> None:
    sides = {"without": model(rows)}
    for factor in (0.05, 0.2, 1.0):
        sides[f"{factor}"] = cache_tables(model(rows), factor)  # type: ignore[assignment]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for kjt in batches(ids, batch):
        outs = []
        for name, module in sides.items():
            took, out = step(module, kjt)
            times[name].append(took)
            outs.append(out)
        assert all(torch.equal(out, outs[0]) for out in outs[1:]), "the same bits behind every cache"
    wants = [*sides["without"].state_dict().values()]
    wants += sides["without"].fused_optimizer.state_dict()["state"]["embedding_bags.t.weight"].values()
    rates = {name: m.cache_stats()["t"].hit_rate for name, m in sides.items() if m.cache_stats()}
    for module in sides.values():
        flush_caches(module)
        own = [*module.state_dict().values()]
        own += module.fused_optimizer.state_dict()["state"]["embedding_bags.t.weight"].values()
        assert all(torch.equal(a, b) for a, b in zip(own, wants, strict=True)), "the same rows and state"
    print(f"\nTraining steps, Zipf 1.05, dim {DIM}, {batch:,} ids in bags of {BAG}, row-wise Adagrad, CPU")
    print("| load factor | hit rate, all batches | ms per step | of that without a cache |\n|---|---|---|---|")
    base = statistics.median(times["without"][len(times["without"]) // 2 :])
    for name, own_times in times.items():
        took = statistics.median(own_times[len(own_times) // 2 :])
        rate = f"{100 * rates[name]:.1f} %" if name in rates else ""
        print(f"| {name} | {rate} | {1e3 * took:.1f} | {took / base:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--batches", type=int, default=100, help="measured; as many come before")
    parser.add_argument("--ratings", type=Path, help="ratings.csv of MovieLens")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )  # fmt: skip
    print(f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, {status()}")
    print("python benchmarks/cached.py", *(f"--{k} {v}" for k, v in vars(arguments).items() if v is not None))
    count = 2 * arguments.batches * arguments.batch
    for exponent in (1.05, 0.8):
        ids = zipf(arguments.rows, count, exponent, 1)
        print_hit_rates(f"Zipf {exponent}", ids, arguments.rows, arguments.batch)
    if arguments.ratings is not None:
        ids, rows = rated_movies(arguments.ratings)
        print_hit_rates("MovieLens ratings, in their order", ids, rows, 256)
    steps = min(arguments.batches, 60)
    print_times(arguments.rows, zipf(arguments.rows, steps * arguments.batch, 1.05, 2), arguments.batch)


if __name__ == "__main__":
    main()
