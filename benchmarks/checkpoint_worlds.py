"""Benchmark of loads on other numbers of ranks than those that saved.

    python benchmarks/checkpoint_worlds.py [--gb 0.5] [--rounds 5] [--folder FOLDER]

Two ranks save four row-wise tables of float32 rows of 64 columns under row-wise Adagrad. Then 1, 2 and 3 ranks of this
machine load the checkpoint in turns, after its files were dropped from the page cache. A time is that of the slowest
rank, from a common start to the end of `load`. The digest of a checkpoint that each number of ranks writes is compared
before a number is printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, apply_optimizer_in_backward
from tilerec.checkpoint import load, save
from tilerec.checkpoint.contents import SavedContents
from tilerec.parallel import DistributedModelParallel
from tilerec.planner.helpers import row_wise
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.testing.ranks import Ranks

DIM, TABLES, SAVED_BY, WORLDS = 64, 4, 2, (1, 2, 3)


def _parts(rows: int) -> dict[str, Any]:
    torch.manual_seed(dist.get_world_size())
    tables = [EmbeddingBagConfig(rows, DIM, f"t{i}", feature_names=[f"f{i}"]) for i in range(TABLES)]
    module = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    model = DistributedModelParallel(module, plan={f"t{i}": row_wise() for i in range(TABLES)})
    return {"model": model, "optimizer": model.fused_optimizer}


def save_rows(path: str, rows: int, loaded: str = "") -> None:
    """Save tables, after a load if there is a path to load."""
    parts = _parts(rows)
    if loaded:
        load(loaded, parts)
    save(path, parts)


def load_seconds(path: str, rows: int) -> float:
    parts = _parts(rows)
    dist.barrier()
    began = time.perf_counter()
    load(path, parts)
    return time.perf_counter() - began


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
    found: dict[int, list[float]] = {world: [] for world in WORLDS}
    with tempfile.TemporaryDirectory(dir=own.folder) as folder:
        pools = {world: Ranks(world, timeout_s=600.0) for world in WORLDS}
        path = f"{folder}/saved"
        pools[SAVED_BY].run(save_rows, path, rows)
        digest = SavedContents(path).digest()
        for world, pool in pools.items():
            again = f"{folder}/by-{world}"
            pool.run(save_rows, again, rows, path)
            assert SavedContents(again).digest() == digest
            shutil.rmtree(again)
        for turn in range(own.rounds):
            for world in WORLDS[turn % len(WORLDS) :] + WORLDS[: turn % len(WORLDS)]:
                drop(path)
                found[world].append(max(pools[world].run(load_seconds, path, rows)))
        for pool in pools.values():
            pool.close()
    size = TABLES * rows * (DIM + 1) * 4 / 1e9
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {size:.2f} GB by {SAVED_BY} ranks")
    for world, seconds in found.items():
        ratio = median(one / same for one, same in zip(seconds, found[SAVED_BY], strict=True))
        print(f"{world} ranks  {median(seconds):6.3f} s (best {min(seconds):.3f})  {ratio:5.2f} of {SAVED_BY} ranks")


if __name__ == "__main__":
    main()
