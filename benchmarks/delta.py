"""Benchmark of logs of published states: the cost of tracking in a step, the size of deltas, the speed of a follower.

    python benchmarks/delta.py [--rounds 7] [--rows 100000] [--samples 10000] [--parts served ...] [--kinds int8 fp32]

tracking    26 tables of 64 columns, batches of 2,048 samples with 10 ids per feature (Zipf law of exponent 1.05),
            row-wise Adagrad: the tables alone, and within a DLRM (512-256-64, 512-256-1). Two models take turns, one of
            them with a writer that observes its tables; processor time.
delta       bytes and seconds of a delta after 1, 10 and 100 such steps, beside the model
served      that DLRM, quantized to int8 or with its float32 rows, is exported. One thread runs single samples on the
            package, in turn alone and beside a follower in another thread, which applies a delta of a million rows
            (int8: 68 bytes each), from its open to the last row. Samples come without a pause, or one at each
            millisecond, from which its time counts. The follower works alone as well. Samples "with their core" are
            those during which no other process took the core.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from lookup import machine
from torch import Tensor, nn

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, apply_optimizer_in_backward
from tilerec.delta import DeltaWriter, EntryName
from tilerec.export import export
from tilerec.models.dlrm import DLRM
from tilerec.quantized import quantize_tables
from tilerec.serve.package_copy import copy_package
from tilerec.serve.served_model import Version, tried
from tilerec.spec.optimizer import RowWiseAdagrad

TABLES, DIM, DENSE, BATCH, LENGTH, EXPONENT = 26, 64, 13, 2048, 10, 1.05
DELTA_ROWS = 1_000_000
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
            models = [DLRM(tables, DENSE, [512, 256, 64], [512, 256, 1]) for tables in own_tables]
            dense = torch.rand(BATCH, DENSE)
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


# ------------------------------------------------------------------------------------------------------------- served


class Reader:
    """Runs single samples on a served version, and notes the seconds of each.

    Attributes:
        every: seconds from one sample to the next; 0: without a pause.
    """

    def __init__(self, version: Version, rows: int) -> None:
        draw = torch.Generator().manual_seed(5)
        lengths = np.ones((TABLES, 1), np.int32)
        self._version, self._at, self.every = version, 0, 0.0
        self._requests = [
            [
                torch.randn(1, DENSE, generator=draw).numpy(),
                torch.randint(0, rows, (TABLES,), generator=draw).numpy(),
                lengths,
            ]
            for _ in range(1000)
        ]

    def read(self, go_on: Callable[[int], bool]) -> list[tuple[float, bool]]:
        """Return seconds of each sample, and whether another process took the core meanwhile."""
        found: list[tuple[float, bool]] = []
        began = time.perf_counter()
        while go_on(len(found)):
            request = self._requests[self._at % len(self._requests)]
            self._at += 1
            switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
            if self.every:
                began += self.every
                time.sleep(max(0.0, began - time.perf_counter()))
            else:
                began = time.perf_counter()
            self._version.run(request)
            seconds = time.perf_counter() - began
            found.append((seconds, resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw != switches))
        return found


class Served:
    """A package of a model that trains on: its log, its follower and its reader."""

    def __init__(self, kind: str, rows: int, folder: Path) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = DLRM(model_of(rows), DENSE, [512, 256, DIM], [512, 256, 1]).eval()
        if kind == "int8":
            self.model = quantize_tables(self.model, "int8")
        lengths = torch.ones(TABLES * 2, dtype=torch.int32)
        example = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.zeros(TABLES * 2, dtype=torch.int64), lengths)
        path, log = folder / f"{kind}.pt2", folder / f"log-{kind}"
        export(self.model, (torch.randn(2, DENSE), example), path)
        self.writer = DeltaWriter(log, self.model, base_every=10_000)
        self.writer.publish(0)
        copy = copy_package(path)
        self.version = tried(copy.load(), follows=True)
        copy.close()
        self.follower, self.reader = self.version.follow(log), Reader(self.version, rows)
        state = self.model.state_dict().values()
        self._tables = [value for value in state if value.dim() == 2 and value.shape[0] == rows]
        self._rows, self._draw, self._number = rows, torch.Generator().manual_seed(3), 0
        self.count = DELTA_ROWS // TABLES * TABLES

    def publish(self) -> EntryName:
        """Publish a delta of `count` rows."""
        self._number += 1
        with torch.no_grad():
            for value in self._tables:
                value[torch.randperm(self._rows, generator=self._draw)[: self.count // TABLES]] += 1
        self.writer.publish(self._number)
        os.sync()  # the entry's pages go to the disk now, not beside the samples
        return EntryName(self._number, False)

    def apply(self, name: EntryName) -> tuple[float, float]:
        """Apply a delta; return seconds, and seconds of processor time."""
        began, used = time.perf_counter(), time.thread_time()
        self.follower.apply(name)
        return time.perf_counter() - began, time.thread_time() - used

    def apply_beside_requests(self) -> tuple[tuple[float, float], list[tuple[float, bool]]]:
        """Publish and apply a delta while samples run; return both times."""
        name, done, found = self.publish(), threading.Event(), list[tuple[float, bool]]()
        thread = threading.Thread(target=lambda: found.extend(self.reader.read(lambda _: not done.is_set())))
        thread.start()
        times = self.apply(name)
        done.set()
        thread.join()
        return times, found


def served(kind: str, rows: int, folder: Path, samples: int, limits: Sequence[float]) -> None:
    own = Served(kind, rows, folder)
    torch.set_num_threads(1)  # as in a worker of `tilerec serve`
    gc.collect()
    gc.freeze()  # as its parent does: else a collection of all objects of torch's compiler takes 0.25 s
    own.reader.read(lambda found: found < 500)
    own.apply(own.publish())  # pages that are mapped from the package become its own
    alone = [own.apply(own.publish()) for _ in range(5)]
    wall, used = (own.count / median(column) / 1e6 for column in zip(*alone, strict=True))
    print(f"follower   {kind}: {wall:.2f} million rows/s alone, {used:.2f} in a second of processor time")
    for name, every, count in (("without a pause", 0.0, samples), ("one a millisecond", 0.001, samples // 5)):
        own.reader.every = every
        for limit in limits:
            own.follower.rows_per_second = limit or None
            beside(own, f"{kind}, {name}, {f'at most {limit / 1e6:g} million rows/s' if limit else 'no limit'}", count)
    weights = own.version.package.weights
    for name, value in own.model.state_dict().items():
        assert name not in weights or np.array_equal(weights[name], value.numpy())
    own.writer.close()


def beside(own: Served, name: str, samples: int) -> None:
    """Print the rows of a follower beside samples, and the times of these beside it and alone, in turn."""
    sides: tuple[list[tuple[float, bool]], list[tuple[float, bool]]] = [], []
    together = list[tuple[float, float]]()
    while len(sides[1]) < samples:
        times, found = own.apply_beside_requests()
        together.append(times)
        sides[1].extend(found)
        sides[0].extend(own.reader.read(lambda read, found=found: read < len(found)))
    wall, used = (own.count / median(column) / 1e6 for column in zip(*together, strict=True))
    print(f"follower   {name}: {wall:.2f} million rows/s, {used:.2f} in a second of processor time")
    for which in ("all", "with their core"):
        a, b = (np.array([1e6 * one for one, lost in side if which == "all" or not lost]) for side in sides)
        p50_a, p99_a, p50_b, p99_b = (float(np.percentile(side, q)) for side in (a, b) for q in (50, 99))
        print(
            f"served     {name}, samples {which}: {len(a):,} alone p50 {p50_a:.0f} us, p99 {p99_a:.0f}; "
            f"{len(b):,} beside p50 {p50_b:.0f} us, p99 {p99_b:.0f}: {p99_b / p99_a:.2f} of the p99"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--parts", nargs="+", default=["tracking", "delta", "served"])
    parser.add_argument("--kinds", nargs="+", default=["int8", "fp32"], help="rows of the served model")
    parser.add_argument("--limits", type=float, nargs="+", default=[2e6, 0], help="rows/s of the follower; 0: no limit")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    print(f"{machine()}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"load of the machine {os.getloadavg()[0]:.1f}")
    try:
        if "tracking" in options.parts:
            tracking(options.rows, folder, options.rounds)
        if "delta" in options.parts:
            deltas(options.rows, folder)
        torch.set_num_threads(1)
        for kind in options.kinds if "served" in options.parts else ():
            served(kind, options.rows, folder, options.samples, options.limits)
        print(f"load of the machine {os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
