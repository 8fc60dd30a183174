"""Ids to rows: the hash op beside TorchRec's managed collision on CPU and a Python dictionary.

    python benchmarks/hash.py [--peer PATH/TO/python] [--ids 10000000] [--batch 65536] [--rows 1049088] [--device cuda]

The claims: an id is looked up, and inserted if it is new, in tens of nanoseconds at any load. No two live ids share a
row, while plain hashing (id modulo rows) makes a large part of the ids share one.

A table of 768 buckets is filled to a load with distinct ids. Then a stream of ids by Zipf's law passes: of the ids in
the table at loads below 1, of four times as many ids as rows at load 1. The native op with each number of threads (on
tables of their own), read-only find and a dictionary (which at load 1 evicts its oldest entry) take the stream in turns
of 16 batches. Medians over batches are printed. Before, a batch of the native op is compared with the reference, bit
for bit; after, the tables of the numbers of threads with each other. TorchRec's `MCHManagedCollisionModule` (LFU) takes
the first batches of the same stream, from a table that was filled alike.

With `--device cuda` tables on the GPU take the stream too, by the Triton kernels. Their rows and state are compared
with the native op's. Ids are on the GPU before the clock starts, and it stops when the GPU has finished. "each" is
`zch_assign_each_`, which does not wait in between.

TorchRec's module keeps a sorted table and works every `eviction_interval` batches; a new id has the shared last row
until then. Two intervals are shown, 1, as here, and 8. Their times are means over batches, since only every 8th batch
does the work. Its hash-based module has CUDA kernels only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hash_peer import Workload
from torch import Tensor

from tilerec.ops import backends as backends
from tilerec.ops.hash.assign import zch_assign_reference
from tilerec.ops.hash.definition import (
    AssignOptions,
    HashRange,
    HashState,
    IdOutcome,
    Policy,
    empty_state,
    zch_assign_,
    zch_assign_each_,
    zch_find,
)
from tilerec.ops.hash.state import AssignCall
from tilerec.ops.runtime.cpu.library import library, status

BUCKETS = 768
TURN = 16  # consecutive batches of one implementation
PEERS = ((1, 1), (1, 2), (8, 2))  # eviction interval, threads


class Peer:
    """TorchRec's module in its own process."""

    def __init__(self, python: str) -> None:
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("hash_peer.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit("The peer ended before it answered.")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Dictionary:
    """A Python dict from id to row; when the rows are used up, the oldest entry is evicted."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.row_of: dict[int, int] = {}
        self.id_of: list[int] = []
        self.next = 0

    def step(self, ids_N: Tensor) -> Tensor:
        row_of, id_of, out = self.row_of, self.id_of, []
        for id_ in ids_N.tolist():
            row = row_of.get(id_)
            if row is None:
                row = len(id_of)
                if row < self.rows:
                    id_of.append(id_)
                else:
                    row = self.next
                    self.next = row + 1 if row + 1 < self.rows else 0
                    del row_of[id_of[row]]
                    id_of[row] = id_
                row_of[id_] = row
            out.append(row)
        return torch.tensor(out)


class Line(NamedTuple):
    """One implementation at one load; ids per second in millions."""

    load: float
    side: str
    fill: float | None
    stream: float | None
    shared: float  # fraction of the stream's ids whose row another id has too, or that have none
    evicted: float | None

    def cells(self) -> list[str]:
        evicted = "" if self.evicted is None else f"{100 * self.evicted:.2f} %"
        fill, stream = ("" if speed is None else f"{speed:.2f}" for speed in (self.fill, self.stream))
        return [f"{self.load:.1f}", self.side, fill, stream, f"{100 * self.shared:.2f} %", evicted]


HEADER = ("load", "side", "fill, M ids/s", "stream, M ids/s", "share a row or have none", "evictions")


def clock(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def shares(ids_N: Tensor, rows_N: Tensor) -> float:
    """Return the fraction of ids whose row another id uses too, or that have none."""
    rank_N = torch.unique(ids_N, return_inverse=True)[1]
    pair_P = torch.unique(torch.stack([rows_N, rank_N]), dim=1)[0]
    row_R, count_R = torch.unique(pair_P, return_counts=True)
    crowded_R = (count_R > 1) | (row_R < 0)
    return float(crowded_R[torch.searchsorted(row_R, rows_N)].double().mean())


class Ours:
    """The native op on its own table."""

    def __init__(self, table: HashRange, threads: int) -> None:
        self.table, self.threads, self.steps = table, threads, 0
        self.state = empty_state(table.buckets, table.slots)
        for values in self.state:
            backends.advise_huge_pages(values)

    def step(self, ids_N: Tensor) -> Any:
        self.steps += 1
        torch.set_num_threads(self.threads)
        return zch_assign_(ids_N, self.state, self.table, AssignOptions(step=self.steps, policy=Policy.LFU))

    def find(self, ids_N: Tensor) -> Any:
        torch.set_num_threads(self.threads)
        return zch_find(ids_N, self.state, self.table)


class OnGpu(Ours):
    """A table on the GPU; every call ends when the GPU has finished."""

    def __init__(self, table: HashRange, each: bool) -> None:
        super().__init__(table, 1)
        self.each = each
        self.state = HashState(*(values.cuda() for values in self.state))

    def step(self, ids_N: Tensor) -> Any:
        self.steps += 1
        assign = zch_assign_each_ if self.each else zch_assign_
        return self._done(assign(ids_N, self.state, self.table, AssignOptions(self.steps, Policy.LFU)))

    def find(self, ids_N: Tensor) -> Any:
        return self._done(zch_find(ids_N, self.state, self.table))

    def _done(self, result: Any) -> Any:
        torch.cuda.synchronize()
        return result


class Gpu:
    """The tables on the GPU, and the times of their batches."""

    def __init__(self, table: HashRange) -> None:
        self.sides = {"cuda": OnGpu(table, False), "cuda, each": OnGpu(table, True)}
        self.fill: dict[str, float] = {}
        self.times: dict[str, list[float]] = {}

    def filled(self, filling: list[Tensor], ids: int) -> None:
        batches = [ids_N.cuda() for ids_N in filling]
        warm = {name: OnGpu(side.table, side.each) for name, side in self.sides.items()}
        for side in warm.values():  # compiles
            for work in (side.step, side.step, side.find):
                work(batches[0])
        for name, side in self.sides.items():
            self.fill[name] = ids / sum(clock(lambda i=i, s=side: s.step(i))[0] for i in batches)

    def turn(self, turn: list[Tensor], previous: list[Tensor], expected: list[Any]) -> None:
        """Run a turn of batches; the rows must equal those of the native op."""
        batches, found = [ids_N.cuda() for ids_N in turn], [ids_N.cuda() for ids_N in previous]
        for name, side in self.sides.items():
            taken = [clock(lambda i=i, s=side: s.step(i)) for i in batches]
            self.times.setdefault(name, []).extend(seconds for seconds, _ in taken)
            finds = [clock(lambda i=i, s=side: s.find(i))[0] for i in found]
            self.times.setdefault(f"find {name}", []).extend(finds)
            for (_, mine), native in zip(taken, expected, strict=True):
                if not torch.equal(mine.rows_N.cpu(), native.rows_N):
                    raise SystemExit("The GPU and the native op differ; no times are printed.")

    def compare(self, state: HashState) -> None:
        for side in self.sides.values():
            if not all(torch.equal(mine.cpu(), own) for mine, own in zip(side.state, state, strict=True)):
                raise SystemExit("The GPU's table and the native op's differ; no times are printed.")

    def lines(self, load: float, batch: int, shared: float) -> Iterator[Line]:
        def speed(side: str) -> float:
            return batch / statistics.median(self.times[side]) / 1e6

        for name in self.sides:
            yield Line(load, f"tilerec, {name}", self.fill[name] / 1e6, speed(name), shared, None)
        yield Line(load, "tilerec, cuda, find only", None, speed("find cuda"), shared, None)


def against_reference(ours: Ours, ids_N: Tensor) -> float:
    """Return the seconds of the reference for a batch whose results are compared with the native op's."""
    table = ours.table
    states = [HashState(*(values.clone() for values in ours.state)) for _ in range(2)]
    options = AssignOptions(ours.steps + 1, Policy.LFU)
    native, reference = (AssignCall.of(ids_N, state, table, options) for state in states)
    made = torch.ops.tilerec.zch_assign_(*native.packed())
    seconds, expected = clock(lambda: zch_assign_reference(reference))
    for one, other in zip([*made, *states[0]], [*expected, *states[1]], strict=True):
        if not torch.equal(one, other):
            raise SystemExit("The native op and the reference differ; no times are printed.")
    return seconds


def measure(options: argparse.Namespace, load: float, peer: Peer | None) -> Iterator[Line]:
    table = HashRange(BUCKETS, options.rows // BUCKETS, options.max_probe)
    rows = table.buckets * table.slots
    universe = int(load * rows) if load < 1 else 4 * rows
    work = Workload(rows, universe, min(universe, rows), options.batch, options.zipf)
    batches = options.ids // options.batch
    weights_U = work.weights()
    sides = {threads: Ours(table, threads) for threads in options.threads}
    gpu = Gpu(table) if options.device == "cuda" else None
    dictionary = Dictionary(rows)
    fill: dict[str, float] = {}
    filling = work.fill()
    for threads, ours in sides.items():
        fill[f"{threads}"] = work.filled / sum(clock(lambda i=ids_N, o=ours: o.step(i))[0] for ids_N in filling)
    if gpu is not None:
        gpu.filled(filling, work.filled)
    fill["dict"] = work.filled / sum(clock(lambda i=ids_N: dictionary.step(i))[0] for ids_N in filling)
    first = next(iter(sides.values()))
    reference = against_reference(first, work.batch_ids(0, weights_U))

    times: dict[str, list[float]] = {}
    evicted, crowded, stream = 0, [], []
    previous = [work.batch_ids(n, weights_U) for n in range(TURN)]
    for number in range(0, batches, TURN):
        turn = [work.batch_ids(n, weights_U) for n in range(number, min(number + TURN, batches))]
        stream += turn
        for threads, ours in sides.items():
            taken = [clock(lambda i=ids_N, o=ours: o.step(i)) for ids_N in turn]
            times.setdefault(f"{threads}", []).extend(seconds for seconds, _ in taken)
            found = [clock(lambda i=ids_N, o=ours: o.find(i)) for ids_N in previous]
            times.setdefault(f"find {threads}", []).extend(seconds for seconds, _ in found)
            time.sleep(0.01)  # threads spin a little before they sleep: keep that out of the next time
        if gpu is not None:
            gpu.turn(turn, previous, [result for _, result in taken])
        evicted += sum(int((result.outcomes_N == IdOutcome.EVICTED).sum()) for _, result in taken)
        previous = turn
        crowded.append(shares(turn[-1], taken[-1][1].rows_N))
        times.setdefault("dict", []).extend(clock(lambda i=ids_N: dictionary.step(i))[0] for ids_N in turn)
    for ours in sides.values():
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(ours.state, first.state, strict=True)):
            raise SystemExit("Tables of different numbers of threads differ; no times are printed.")

    if gpu is not None:
        gpu.compare(first.state)

    def speed(side: str) -> float:
        return options.batch / statistics.median(times[side]) / 1e6

    share = statistics.mean(crowded)
    ids = options.batch * batches
    for threads in sides:
        name = f"tilerec, {_threads(threads)}"
        yield Line(load, name, fill[f"{threads}"] / 1e6, speed(f"{threads}"), share, evicted / ids)
        yield Line(load, f"{name}, find only", None, speed(f"find {threads}"), share, None)
    if gpu is not None:
        yield from gpu.lines(load, options.batch, share)
    yield Line(load, "tilerec, reference", None, options.batch / reference / 1e6, share, None)
    yield Line(load, "Python dict", fill["dict"] / 1e6, speed("dict"), 0.0, None)
    for interval, threads in PEERS if peer is not None else ():
        assert peer is not None
        name = f"TorchRec MCH, every {interval}, {_threads(threads)}"
        yield peer_line(peer, name, load, work, interval, threads, options.peer_batches)
    ids_S = torch.cat(stream)
    yield Line(load, "id modulo rows", None, None, shares(ids_S, ids_S % rows), None)


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def peer_line(peer: Peer, name: str, load: float, work: Workload, interval: int, threads: int, batches: int) -> Line:
    """Run TorchRec's module on the first batches of the stream; whole intervals, for the mean."""
    filling = peer.ask("fill", work=dataclasses.asdict(work), interval=interval, threads=threads)["seconds"]
    batches = -(-batches // interval) * interval
    answers = [peer.ask("step", number=number, threads=threads) for number in range(batches)]
    shared = sum(answer["shared"] for answer in answers)
    ids = work.batch * batches
    seconds = sum(answer["seconds"] for answer in answers)
    return Line(load, name, work.filled / filling / 1e6, ids / seconds / 1e6, shared / ids, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=os.environ.get("TILEREC_PEER_PYTHON", ".venv-peer/bin/python"))
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--rows", type=int, default=768 * 1366)
    parser.add_argument("--max-probe", type=int, default=128)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--loads", type=lambda text: [float(x) for x in text.split(",")], default=[0.5, 0.9, 1.0])
    parser.add_argument("--threads", type=lambda text: [int(x) for x in text.split(",")], default=[1, 2])
    parser.add_argument("--peer-batches", type=int, default=8, help="batches of the stream that TorchRec takes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if library() is None:
        raise SystemExit(str(status()))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no GPU here.")
    peer = Peer(options.peer) if Path(options.peer).exists() else None
    print(f"- machine: {platform.machine()}, {os.cpu_count()} cores; torch {torch.__version__}; {status()}")
    if options.device == "cuda":
        print(f"- GPU: {torch.cuda.get_device_name()}")
    if peer is None:
        print(f"- peer: none ({options.peer} is not there; TILEREC_PEER_PYTHON or --peer name another one)")
    else:
        hello = peer.ask("hello")
        print(f"- peer: torchrec {hello['torchrec']}, torch {hello['torch']}")
    print(f"- recipe: `{' '.join(['python', *sys.argv])}`, {time.strftime('%Y-%m-%d')}; medians over batches\n")
    print("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|", flush=True)
    for load in options.loads:
        for line in measure(options, load, peer):
            print("| " + " | ".join(line.cells()) + " |", flush=True)
    if peer is not None:
        peer.close()


if __name__ == "__main__":
    main()
