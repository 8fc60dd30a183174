"""Benchmark of checkpoints: saving and loading beside torch.distributed.checkpoint (DCP) and the disk itself.

    python benchmarks/checkpoint.py [--gb 1.0] [--rounds 6] [--folder FOLDER]

One process holds a table of float32 rows of 64 columns. Each round, in turns:

    disk     the same bytes written to one file with fsync, and read back
    save     tilerec.checkpoint.save: data, checksums, manifest, fsync of files and folders
    DCP      torch.distributed.checkpoint.save, without a process group (its writer calls fsync, too)
    load     each side into a table that exists, after the files were dropped from the page cache
    eighth   the first eighth of the rows: tilerec reads those bytes; DCP reads the chunk that holds them

Values are compared before a number is printed. Rates are GB of values per second of wall time, medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tilerec.checkpoint import Changes, load, save

DIM = 64


def dropped(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def disk_write(path: Path, table: torch.Tensor) -> None:
    data = table.view(-1).view(torch.uint8).numpy().data
    with path.open("wb", buffering=0) as file:
        for first in range(0, len(data), 1 << 26):
            file.write(data[first : first + (1 << 26)])
        os.fsync(file.fileno())


def disk_read(path: Path, table: torch.Tensor) -> None:
    data = table.view(-1).view(torch.uint8).numpy().data
    with path.open("rb", buffering=0) as file:
        for first in range(0, len(data), 1 << 26):
            file.readinto(data[first : first + (1 << 26)])  # type: ignore[attr-defined]


def one_round(folder: Path, table: torch.Tensor, turn: int) -> dict[str, float]:
    """Return the seconds of each action; writes begin with another one in each round."""
    found: dict[str, float] = {}
    into = torch.zeros_like(table)
    rows = len(table) // 8

    def check(part: torch.Tensor) -> None:
        assert torch.equal(part, table[: len(part)])
        part.zero_()

    writes: list[tuple[str, Callable[[], Any]]] = [
        ("disk write", lambda: disk_write(folder / "raw", table)),
        ("save", lambda: save(folder / "own", {"table": table})),
        ("DCP save", lambda: dcp.save({"table": table}, checkpoint_id=folder / "dcp", no_dist=True)),
    ]
    for name, action in writes[turn % 3 :] + writes[: turn % 3]:
        found[name] = seconds(action)
    dropped(folder)
    found["disk read"] = seconds(lambda: disk_read(folder / "raw", into))
    check(into)
    found["load"] = seconds(lambda: load(folder / "own", {"table": into}))
    check(into)
    found["DCP load"] = seconds(lambda: dcp.load({"table": into}, checkpoint_id=folder / "dcp", no_dist=True))
    check(into)
    dropped(folder)
    eighth = torch.zeros(rows, DIM)
    found["eighth"] = seconds(lambda: load(folder / "own", {"table": eighth}, changes=Changes(resize=["table"])))
    check(eighth)
    for name in ("own", "dcp"):
        shutil.rmtree(folder / name)
    (folder / "raw").unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", default=None, help="on the disk to measure; default: a temporary folder")
    own = parser.parse_args()
    rows = int(own.gb * 1e9 / 4 / DIM) // 8 * 8
    table = torch.randn(rows, DIM)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(dir=own.folder) as folder:
        rounds = [one_round(Path(folder), table, turn) for turn in range(own.rounds)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {rows:,} x {DIM} float32")
    for name in sorted(rounds[0]):
        base = "disk read" if name in ("load", "DCP load", "eighth", "disk read") else "disk write"
        part = 8 if name == "eighth" else 1
        rate = median(table.nbytes / part / each[name] / 1e9 for each in rounds)
        ratio = median(each[base] / (each[name] * part) for each in rounds)
        print(f"{name:12} {median(each[name] for each in rounds):7.2f} s  {rate:6.2f} GB/s  {ratio:5.2f} of the disk")
    print(f"largest growth of the process: {grown / 1024:,.0f} MiB (a second table is {table.nbytes / 2**20:,.0f})")


if __name__ == "__main__":
    main()
