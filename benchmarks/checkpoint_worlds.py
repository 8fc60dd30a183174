"""Benchmark of loads under other plans and on other numbers of ranks than those that saved: time and memory.

    python benchmarks/checkpoint_worlds.py [--gb 0.5] [--rounds 5] [--folder FOLDER]

Two ranks save four row-wise tables of float32 rows of 64 columns under row-wise Adagrad. Then 1, 2 and 3 ranks of this
machine load the checkpoint in turns, after its files were dropped from the page cache. A time is that of the slowest
rank, from a common start to the end of `load`. Two ranks also load halves of the columns, under two memory budgets:
every byte passes through buffers, because each rank needs a part of each row. The digest of a checkpoint that each plan
and number of ranks writes is compared before a number is printed.

    peak      most resident memory of a rank during the load, beyond that before it, which holds the tables
    read      bytes that all ranks have read by system calls, as a multiple of the checkpoint's
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, apply_optimizer_in_backward
from tilerec.checkpoint import load, save
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.scratch_memory import DEFAULT_BUDGET, LEAST_BUDGET
from tilerec.parallel import DistributedModelParallel
from tilerec.planner.helpers import Cut, column_wise, row_wise
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.testing.ranks import Ranks

DIM, TABLES, SAVED_BY, WORLDS = 64, 4, 2, (1, 2, 3)
ROWS, COLUMNS = row_wise(), column_wise(ranks=range(SAVED_BY))
BUDGETS = (LEAST_BUDGET, DEFAULT_BUDGET)


class Loaded(NamedTuple):
    """Costs of a load on one rank: seconds, bytes of its peak, bytes read."""

    seconds: float
    peak: int
    read: int


def _parts(rows: int, cut: Cut) -> dict[str, Any]:
    torch.manual_seed(dist.get_world_size())
    tables = [EmbeddingBagConfig(rows, DIM, f"t{i}", feature_names=[f"f{i}"]) for i in range(TABLES)]
    module = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    model = DistributedModelParallel(module, plan={f"t{i}": cut for i in range(TABLES)})
    return {"model": model, "optimizer": model.fused_optimizer}


def save_tables(path: str, rows: int, cut: Cut, loaded: str = "") -> None:
    """Save tables, after a load if there is a path to load."""
    parts = _parts(rows, cut)
    if loaded:
        load(loaded, parts)
    save(path, parts)


def _kernel_count(file: str, name: str) -> int:
    """Return a number that the kernel counts for this process."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def load_tables(path: str, rows: int, cut: Cut, budget: int = DEFAULT_BUDGET) -> Loaded:
    parts = _parts(rows, cut)
    for value in parts["model"].parameters():
        value.data.zero_()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # begins the kernel's peak anew
    before, read = _kernel_count("status", "VmRSS"), _kernel_count("io", "rchar")
    dist.barrier()
    began = time.perf_counter()
    load(path, parts, memory_budget=budget)
    seconds = time.perf_counter() - began
    peak = (_kernel_count("status", "VmHWM") - before) << 10
    return Loaded(seconds, peak, _kernel_count("io", "rchar") - read)


def drop(folder: str) -> None:
    """Drop the files of a folder from the page cache."""
    for path in Path(folder).iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure; default: a temporary folder")
    own = parser.parse_args()
    rows = int(own.gb * 1e9 / 4 / DIM / TABLES)
    cases = [(world, ROWS, DEFAULT_BUDGET) for world in WORLDS] + [(SAVED_BY, COLUMNS, budget) for budget in BUDGETS]
    found: list[list[list[Loaded]]] = [[] for _ in cases]
    with tempfile.TemporaryDirectory(dir=own.folder) as folder:
        pools = {world: Ranks(world, timeout_s=600.0) for world in WORLDS}
        path = f"{folder}/saved"
        pools[SAVED_BY].run(save_tables, path, rows, ROWS)
        digest = SavedContents(path).digest()
        size = SavedContents(path).bytes
        for world, cut in dict.fromkeys((world, cut) for world, cut, _ in cases):
            again = f"{folder}/again"
            pools[world].run(save_tables, again, rows, cut, path)
            assert SavedContents(again).digest() == digest
            shutil.rmtree(again)
        for turn in range(own.rounds):
            for number in sorted(range(len(cases)), key=lambda number: (number - turn) % len(cases)):
                world, *rest = cases[number]
                drop(path)
                found[number].append(pools[world].run(load_tables, path, rows, *rest))
        for pool in pools.values():
            pool.close()
    machine = platform.processor() or platform.machine()
    print(f"{machine}, torch {torch.__version__}, {size / 1e9:.2f} GB in rows by {SAVED_BY} ranks")
    same = found[WORLDS.index(SAVED_BY)]
    for (world, cut, budget), turns in zip(cases, found, strict=True):
        times = [max(each.seconds for each in ranks) for ranks in turns]
        ratio = median(one / max(each.seconds for each in ranks) for one, ranks in zip(times, same, strict=True))
        peak = max(each.peak for ranks in turns for each in ranks)
        read = median(sum(each.read for each in ranks) for ranks in turns) / size
        name = f"{world} ranks, {'rows' if cut is ROWS else 'columns'}, budget {budget >> 20} MiB"
        print(
            f"{name:32} {median(times):6.3f} s (best {min(times):.3f}), {ratio:4.2f} of {SAVED_BY} ranks in rows;"
            f" peak {peak >> 20} MiB; read {read:.2f}"
        )


if __name__ == "__main__":
    main()
