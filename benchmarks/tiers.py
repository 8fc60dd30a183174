"""Rows in files behind a cache: hit rates, rows per second from memory and from the disk, and resident memory.

    python benchmarks/tiers.py [--folder DIR] [--gib 8] [--batch 16384] [--steps 100] [--parts disk,reads,training]
        [--optimizer rowwise_adagrad]

The claims:

- a table that is 10 to 100 times its cache trains with the bits of a table in memory (checked on a small one)
- cold rows arrive at the rate at which the disk reads at random, from one thread
- the process holds the cache, its bookkeeping (4 bytes per row) and a constant, not the table

disk      the disk's own rate of reads at random: pread of one row at a time, by 1 to 64 threads, from a file as large
          as the table. Cold: the file's pages were dropped (POSIX_FADV_DONTNEED). The host of a virtual machine may
          keep pages of its own, so "cold" is cold for this system only.
reads     rows of a table in a file by `read_rows_` and `write_rows_`, and through its memory map, hot and cold.
training  one table, pooled, one id per bag: hit rate of distinct rows, time of a step, and memory, for caches of a 10th
          and a 100th of the table, Zipf and uniform ids.

RssAnon is memory that only this process can free. RssFile is pages of files that it has mapped, its program's too; the
system drops them when it needs memory. The page cache belongs to no process.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from tilerec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    cache_tables,
)
from tilerec.ops.runtime.cpu.library import status
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec, RowWiseAdagrad
from tilerec.storage.row_file import drop, file_of, release, row_blocks, tensor_in_file

DIM, TURNS, TIMED = 128, 3, 15
ROW = DIM * 4
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "sgd": SGD(lr=0.1),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.1),
    "adam": Adam(lr=0.1),
}


def zipf(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Return ids by Zipf's law of exponent 1.05, popular ones at places far apart.

    The law of a continuous variable, cut to whole numbers: a table of billions of shares would take memory itself.
    """
    a = 0.05
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    rank = (1 - draws * (1 - (rows + 1.0) ** -a)) ** (-1 / a)
    return ((rank.long() - 1).clamp(0, rows - 1) * 2654435761) % rows


def uniform(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Return ids that are all as frequent."""
    return torch.randint(0, rows, (count,), generator=generator)


LAWS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {"Zipf 1.05": zipf, "uniform": uniform}


def held() -> dict[str, float]:
    """Return this process's resident memory in MiB."""
    text = Path("/proc/self/status").read_text()
    found = {}
    for name in ("RssAnon", "RssFile"):
        match = re.search(rf"{name}:\s+(\d+)", text)
        assert match is not None
        found[name] = int(match[1]) / 1024
    return found


def rate(rows: int, count: int, cold: bool, table: Tensor, run: Callable[[Tensor], object]) -> float:
    """Return rows per second of `run(rows)`, the median of some turns."""
    rates = []
    for turn in range(TURNS):
        chosen = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(turn)).unique()
        if cold:
            drop(table)
        else:
            run(chosen)
        start = time.perf_counter()
        run(chosen)
        rates.append(len(chosen) / (time.perf_counter() - start))
    return statistics.median(rates)


def pread_loop(table: Tensor, threads: int) -> Callable[[Tensor], object]:
    """Return a loop of preads, one row each, by some threads."""
    file = file_of(table)
    assert file is not None
    number = file.descriptor

    def loop(rows: list[int]) -> None:
        for row in rows:
            os.pread(number, ROW, row * ROW)

    def run(rows: Tensor) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(loop, [part.tolist() for part in rows.tensor_split(threads)]))

    return run


def tables(folder: str, gib: float) -> Iterator[tuple[Tensor, int]]:
    """Yield a table in a file, with values, and its number of rows."""
    rows = int(gib * 2**30) // ROW
    table = tensor_in_file(folder, (rows, DIM), torch.float32, "table")
    start = time.perf_counter()
    for block in row_blocks(table):
        block.fill_(1.0)
    file = file_of(table)
    assert file is not None
    os.fsync(file.descriptor)
    print(f"write: {table.nbytes / (time.perf_counter() - start) / 2**20:,.0f} MiB/s from the first byte to fsync")
    yield table, rows


def print_disk(table: Tensor, rows: int) -> None:
    print("\ndisk: pread of one row at a time, rows/s\n\n| threads | hot | cold |\n|---|---|---|")
    for threads in (1, 4, 16, 64):
        run = pread_loop(table, threads)
        hot = rate(rows, 65536, False, table, run) if threads == 1 else 0.0
        cold = rate(rows, 4096 if threads < 4 else 16384, True, table, run)
        print(f"| {threads} | {f'{hot:,.0f}' if hot else ''} | {cold:,.0f} |", flush=True)


def print_reads(table: Tensor, rows: int) -> None:
    file = file_of(table)
    assert file is not None
    number, lines = file.descriptor, torch.empty(65536, DIM)
    read, write = torch.ops.tilerec.read_rows_, torch.ops.tilerec.write_rows_
    places = torch.arange(65536)

    def mapped(chosen: Tensor) -> None:
        release(table)  # a process that holds no pages of the table
        torch.index_select(table, 0, chosen, out=lines[: len(chosen)])

    ways: dict[str, Callable[[Tensor], object]] = {
        "read_rows_": lambda chosen: read([lines], places[: len(chosen)], chosen, number, ROW, 0),
        "write_rows_": lambda chosen: write([lines], places[: len(chosen)], chosen, number, ROW, 0),
        "memory map": mapped,
    }
    print(
        "\nreads: 16,384 rows at random in one call, ascending, one thread, rows/s\n\n| | hot | cold |\n|---|---|---|"
    )
    for name, run in ways.items():
        hot, cold = (rate(rows, 16384, cold, table, run) for cold in (False, True))
        print(f"| {name} | {hot:,.0f} | {cold:,.0f} |", flush=True)


def collection(rows: int, optimizer: OptimizerSpec) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(rows, DIM, "table", feature_names=["f"])]
    torch.manual_seed(1)
    module = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(optimizer, module.parameters())
    return module


def step(module: EmbeddingBagCollection, ids: Tensor) -> Tensor:
    batch = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.ones(len(ids), dtype=torch.int64))
    out = module(batch).values()
    out.sum().backward()
    return out.detach()


def check_bits(folder: str, optimizer: OptimizerSpec) -> None:
    """Raise unless a table in files has the outputs, rows and state of one in memory."""
    plain, filed = collection(20000, optimizer), collection(20000, optimizer)
    plain.to_empty(device="cpu")
    cache_tables(filed, 0.01, folder=folder)
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        ids = zipf(20000, 2048, generator)
        assert torch.equal(step(plain, ids), step(filed, ids))
    assert torch.equal(plain.embedding_bags["table"].weight, filed.embedding_bags["table"].weight)
    for a, b in zip(plain.embedding_bags["table"].rows.slots, filed.embedding_bags["table"].rows.slots, strict=True):
        assert torch.equal(a, b)


def print_training(folder: str, gib: float, batch: int, steps: int, optimizer: OptimizerSpec) -> None:
    check_bits(folder, optimizer)
    rows = int(gib * 2**30) // ROW
    record = 4 * sum(math.prod(slot.shape(1, DIM)) for slot in optimizer.slots) + ROW
    print(
        f"\ntraining: {type(optimizer).__name__}, {rows:,} rows, {gib:g} GiB, {rows * (record - ROW) / 2**20:,.0f} MiB "
        f"of state, {batch:,} ids a step; medians of {TIMED} steps after {steps:,}: rows that miss are in the page "
        "cache (hot), or none is (cold)\n"
    )
    print("| cache | ids | hit rate | rows read a step | ms a step, hot | cold | RssAnon, MiB | cache | RssFile |")
    print("|---|---|---|---|---|---|---|---|---|")
    for part in (10, 100):
        module = collection(rows, optimizer)
        before = held()
        cache_tables(module, 1 / part, folder=folder)
        for law, ids_of in LAWS.items():
            generator = torch.Generator().manual_seed(part)
            times: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(steps + 2 * TIMED):
                ids = ids_of(rows, batch, generator)
                if turn == steps:
                    module.cache_stats(reset=True)
                cold = turn >= steps + TIMED
                if cold:
                    drop(module.embedding_bags["table"].rows.leaf)  # and its state, in the same records
                start = time.perf_counter()
                step(module, ids)
                if turn >= steps:
                    times[cold].append(time.perf_counter() - start)
            stats, now = module.cache_stats()["table"], held()
            hot, dropped = (1000 * statistics.median(times[cold]) for cold in (False, True))
            lines = rows / part * (record + 21) / 2**20 + rows * 4 / 2**20
            print(
                f"| 1/{part} | {law} | {stats.hit_rate:.1%} | {stats.misses / stats.requests:,.0f} | {hot:,.0f} | "
                f"{dropped:,.0f} | {now['RssAnon'] - before['RssAnon']:,.0f} | {lines:,.0f} | "
                f"{now['RssFile'] - before['RssFile']:,.0f} |",
                flush=True,
            )
        del module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", default=None, help="on the disk to measure; default: the folder for temporary files"
    )
    parser.add_argument("--gib", type=float, default=8.0, help="size of the table")
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=100, help="before the first that is timed")
    parser.add_argument("--parts", default="disk,reads,training")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad")
    own = parser.parse_args()
    torch.set_num_threads(1)
    folder, parts = own.folder or tempfile.gettempdir(), own.parts.split(",")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {folder}; {status()}")
    print(f"rows of {ROW} bytes; medians of {TURNS} turns")
    if {"disk", "reads"} & set(parts):
        for table, rows in tables(folder, own.gib):
            if "disk" in parts:
                print_disk(table, rows)
            if "reads" in parts:
                print_reads(table, rows)
    if "training" in parts:
        print_training(folder, own.gib, own.batch, own.steps, OPTIMIZERS[own.optimizer])


if __name__ == "__main__":
    main()
