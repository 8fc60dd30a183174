"""Benchmark of logs of published states: the cost of tracking in a step, the size of deltas, the speed of a follower.

    python benchmarks/delta.py [--rounds 7] [--rows 100000] [--folder FOLDER]

tracking    26 tables of 64 columns, batches of 2,048 samples with 10 ids per feature (Zipf law of exponent 1.05),
            row-wise Adagrad: the tables alone, and within a DLRM (512-256-64, 512-256-1). Two models take turns, one of
            them with a writer that observes its tables; processor time.
delta       bytes and seconds of a delta after 1, 10 and 100 such steps, beside the model
follower    one thread applies a delta of a million rows of 68 bytes (64 int8 numbers, scale and bias) to a table
            of that form, and one of 64 float32 columns. Seconds from the open of the delta to its last row.
served      another thread looks up one sample of 26 ids meanwhile: p50 and p99 beside those without a follower
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, apply_optimizer_in_backward
from tilerec.delta import DeltaWriter, EntryName, Follower
from tilerec.models.dlrm import DLRM
from tilerec.spec.optimizer import RowWiseAdagrad

TABLES, DIM, BATCH, LENGTH, EXPONENT = 26, 64, 2048, 10, 1.05
KEYS = [f"f{table}" for table in range(TABLES)]


def model_of(rows: int) -> EmbeddingBagCollection:
    torch.manual_seed(1)
    module = EmbeddingBagCollection([EmbeddingBagConfig(rows, DIM, key, feature_names=[key]) for key in KEYS])
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.01), module.parameters())
    return module


def batches(rows: int, count: int, samples: int = BATCH, length: int = LENGTH) -> list[KeyedJaggedTensor]:
    dice = np.random.default_rng(2)
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT
    sums = np.cumsum(weights) / weights.sum()
    places = dice.permutation(rows)
    made = []
    for _ in range(count):
        ids = places[np.searchsorted(sums, dice.random(TABLES * samples * length)).clip(max=rows - 1)]
        made.append(KeyedJaggedTensor(KEYS, torch.from_numpy(ids), lengths=torch.full((TABLES * samples,), length)))
    return made


def step(module: nn.Module, batch: KeyedJaggedTensor, dense: Tensor | None = None) -> float:
    began = time.process_time()
    out = module(batch).values() if dense is None else module(dense, batch)
    out.sum().backward()
    return time.process_time() - began


def tracking(rows: int, folder: Path, rounds: int) -> None:
    some = batches(rows, 10)
    for what in ("tables", "DLRM"):
        own_tables = [model_of(rows) for _ in range(2)]
        if what == "tables":
            models, dense = own_tables, None
        else:
            models = [DLRM(tables, 13, [512, 256, 64], [512, 256, 1]) for tables in own_tables]
            dense = torch.rand(BATCH, 13)
        writer = DeltaWriter(folder / what, own_tables[1])
        writer.publish(0)
        os.sync()  # the base's pages go to the disk now, not beside the steps
        pairs = []
        for number in range(rounds * 10 + 5):
            first = number % 2  # the two models take turns to be first
            found = {which: step(models[which], some[number % 10], dense) for which in (first, 1 - first)}
            pairs.append((found[0], found[1]))
        writer.close()
        alone, tracked = (median(pair[which] for pair in pairs[5:]) for which in range(2))
        ratio = median(with_it / without for without, with_it in pairs[5:])
        print(
            f"tracking   {what:6}: {alone * 1e3:6.1f} ms, {tracked / alone:.3f} of it with a writer by the medians, "
            f"{ratio:.3f} by the pairs"
        )


def deltas(rows: int, folder: Path) -> None:
    module, some = model_of(rows), batches(rows, 100)
    size = sum(parameter.nbytes for parameter in module.parameters())
    writer = DeltaWriter(folder / "deltas", module, base_every=1000)
    writer.publish(0)
    for count in (1, 10, 100):
        for batch in some[:count]:
            step(module, batch)
        began = time.perf_counter()
        made = writer.publish(count)
        seconds = time.perf_counter() - began
        print(
            f"delta      after {count:3} steps: {made.bytes / 1e6:8.1f} MB, {made.bytes / size:.3f} of the model, "
            f"{seconds:.3f} s"
        )
    writer.close()


class Table(nn.Module):
    """A table of plain rows, and the float tables that are read meanwhile."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(value, requires_grad=False)


def follower(name: str, value: Tensor, count: int, folder: Path, rounds: int, served: EmbeddingBagCollection) -> None:
    """A delta of `count` rows of a table of twice as many."""
    source, target = Table(value.clone()), Table(value.clone())
    writer = DeltaWriter(folder / name, source, base_every=1000)
    writer.publish(0)
    lock = threading.Lock()
    follows = Follower(folder / name, target, lock=lock)
    places = torch.randperm(value.shape[0], generator=torch.Generator().manual_seed(3))[:count]
    seconds, alone, beside = [], [], []
    for number in range(1, rounds + 1):
        source.rows[places] += 1
        writer.publish(number)
        alone += lookups(served, lock, lambda found: len(found) < 500)
        done = threading.Event()
        reads: list[float] = []
        reader = threading.Thread(
            target=lambda reads=reads, done=done: reads.extend(lookups(served, lock, lambda _: not done.is_set()))
        )
        reader.start()
        began = time.perf_counter()
        follows.apply(EntryName(number, False))
        seconds.append(time.perf_counter() - began)
        done.set()
        reader.join()
        beside += reads
        assert torch.equal(target.rows, source.rows)
    took = median(seconds)
    print(f"follower   {name}: {count / took / 1e6:6.2f} million rows/s, {took:.3f} s for {count:,} rows")
    for when, found in (("alone ", alone), ("beside", beside)):
        p50, p99 = (np.percentile(found, q) * 1e6 for q in (50, 99))
        print(f"served     {name}: one sample {when} p50 {p50:7.1f} us, p99 {p99:7.1f} us, {len(found):,} samples")
    writer.close()


def lookups(module: EmbeddingBagCollection, lock: threading.Lock, go_on: Callable[[list[float]], bool]) -> list[float]:
    (batch,) = batches(module.embedding_bag_configs()[0].num_embeddings, 1, samples=1, length=1)
    found: list[float] = []
    with torch.inference_mode():
        while go_on(found):
            began = time.perf_counter()
            with lock:
                module(batch)
            found.append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    try:
        tracking(options.rows, folder, options.rounds)
        deltas(options.rows, folder)
        torch.set_num_threads(1)
        sys.setswitchinterval(0.0005)
        served = model_of(options.rows)
        rows = 2 * 1_000_000
        int8 = torch.randint(0, 255, (rows, DIM + 4), dtype=torch.uint8)
        follower("int8", int8, rows // 2, folder, options.rounds, served)
        follower("fp32", torch.randn(rows, DIM), rows // 2, folder, options.rounds, served)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
