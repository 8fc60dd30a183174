"""A backward + update on a CPU beside the cost of its unavoidable work, both measured in one run.

    python benchmarks/update_bound.py [--optimizer rowwise_adagrad] [--threads 1 2] [--rounds 15]

The bound is the sum of three loops of `update_bound.cpp`, compiled for this machine and timed by turns with the update:

  sort       the occurrences' keys (row, bag), 32 bits each, by row
  rows       every distinct row, and its number of row-wise state, read and written once in the order of rows
  gradients  one gradient row per occurrence, read in the order of the sort: from cache, if it fits

A real update can be faster than the sum if it overlaps these. Times are medians over rounds; a ratio is the median of
the rounds' own. Needs g++.

Legend: T tables, E rows, D columns, B samples, L ids per bag.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from lookup import Ours, copy_speed, machine, make_data  # noqa: E402
from peer import Case  # noqa: E402

STATEFUL = {"sgd": False, "rowwise_adagrad": True}
PASSES, DIGIT = 2, 10


def compiled(folder: Path) -> ctypes.CDLL:
    source, library = Path(__file__).with_suffix(".cpp"), folder / "bound.so"
    subprocess.run(["g++", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


class Bound:
    """The three loops over the tables of a case; threads share the tables."""

    def __init__(self, library: ctypes.CDLL, case: Case, data: dict[str, Tensor], tables: Sequence[Tensor]) -> None:
        self.library, self.case, self.tables = library, case, tables
        self.pool = ThreadPoolExecutor(case.threads)
        self.bits = (case.batch - 1).bit_length()
        if case.rows > 1 << (PASSES * DIGIT) or (case.rows - 1).bit_length() + self.bits > 32:
            raise SystemExit(f"rows {case.rows}, batch {case.batch}: the bound's keys have 32 bits, rows 20 of them")
        bags = torch.arange(case.batch).repeat_interleave(case.length)
        self.keys = [(ids << self.bits | bags).to(torch.uint32) for ids in data["ids"].chunk(case.tables)]
        self.scratch = [torch.empty_like(keys) for keys in self.keys]
        self.other = [torch.empty_like(keys) for keys in self.keys]
        ordered = [keys.long().sort().values for keys in self.keys]
        self.bags = [(keys & ((1 << self.bits) - 1)).to(torch.uint32) for keys in ordered]
        self.rows = [(keys >> self.bits).unique().to(torch.uint32) for keys in ordered]
        self.states = [torch.zeros(case.rows) for _ in tables] if STATEFUL[case.optimizer] else None
        self.grad = data["grad"]
        self.sums = torch.zeros(case.tables, case.dim)

    def _each(self, loop: Callable[[int], object]) -> None:
        if self.case.threads == 1:
            for t in range(self.case.tables):
                loop(t)
        else:
            list(self.pool.map(loop, range(self.case.tables)))

    def sort(self) -> None:
        def loop(t: int) -> None:
            keys = self.scratch[t]
            keys.copy_(self.keys[t])
            at = [ctypes.c_void_p(x.data_ptr()) for x in (keys, self.other[t])]
            self.library.bound_sort(*at, ctypes.c_int64(keys.numel()), self.bits, PASSES)

        self._each(loop)

    def read_and_write_rows(self) -> None:
        def loop(t: int) -> None:
            state = ctypes.c_void_p(self.states[t].data_ptr() if self.states is not None else None)
            self.library.bound_rows(
                ctypes.c_void_p(self.tables[t].data_ptr()), state, ctypes.c_void_p(self.rows[t].data_ptr()),
                ctypes.c_int64(self.rows[t].numel()), ctypes.c_int64(self.case.dim),
            )  # fmt: skip

        self._each(loop)

    def read_gradients(self) -> None:
        def loop(t: int) -> None:
            self.library.bound_gradients(
                ctypes.c_void_p(self.grad.data_ptr() + 4 * t * self.case.dim), ctypes.c_int64(self.grad.shape[1]),
                ctypes.c_void_p(self.bags[t].data_ptr()), ctypes.c_int64(self.bags[t].numel()),
                ctypes.c_int64(self.case.dim), ctypes.c_void_p(self.sums[t].data_ptr()),
            )  # fmt: skip

        self._each(loop)

    def check(self) -> None:
        """Check that the loops did their work."""
        self.sort()
        for t in range(self.case.tables):
            assert torch.equal(self.scratch[t].long(), self.keys[t].long().sort().values)
        self.read_gradients()
        want = self.grad.view(self.case.batch, self.case.tables, self.case.dim).double().sum(0) * self.case.length
        torch.testing.assert_close(self.sums.double(), want, rtol=1e-3, atol=1e-1)


def milliseconds(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return (time.perf_counter() - before) * 1e3


def run(library: ctypes.CDLL, case: Case, rounds: int) -> str:
    torch.set_num_threads(case.threads)
    data = make_data(case)
    ours = Ours(case, data)
    bound = Bound(library, case, data, [table.clone() for table in ours.tables])
    bound.check()
    forward, update = ours.stages()
    calls = {
        "sort": bound.sort, "rows": bound.read_and_write_rows, "gradients": bound.read_gradients,
        "forward": forward, "update": update,
    }  # fmt: skip
    taken = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(rounds + 2)][2:]
    middle = {name: statistics.median(turn[name] for turn in taken) for name in calls}
    sums = [turn["sort"] + turn["rows"] + turn["gradients"] for turn in taken]
    ratio = statistics.median(turn["update"] / total for turn, total in zip(taken, sums, strict=True))
    distinct = sum(rows.numel() for rows in bound.rows)
    cells = [
        case.optimizer, str(case.dim), str(case.length), case.ids, str(case.threads), str(distinct),
        *[f"{middle[name]:.2f}" for name in ("sort", "rows", "gradients")], f"{statistics.median(sums):.2f}",
        f"{middle['update']:.2f}", f"{ratio:.2f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", nargs="*", default=list(STATEFUL), choices=list(STATEFUL))
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--dims", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    speeds = ", ".join(f"{copy_speed(n):.1f} GB/s on {n}" for n in options.threads)
    print(f"{machine()}; copy: {speeds} threads; times in ms\n")
    head = "optimizer D L ids threads distinct sort rows gradients bound update update/bound"
    print("| " + " | ".join(head.split()) + " |\n|" + "---|" * len(head.split()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder))
        for dim in options.dims:
            for optimizer in options.optimizer:
                for threads in options.threads:
                    case = Case(
                        "pooled-train",
                        8,
                        500_000,
                        dim,
                        "fp32",
                        2048,
                        20,
                        "zipf",
                        threads,
                        optimizer=optimizer,
                    )
                    print(run(library, case, options.rounds), flush=True)


if __name__ == "__main__":
    main()
