"""Reading: `TableDataset` beside bare `ParquetFile.iter_batches`, by CPU time and by memory.

    python benchmarks/data.py [--rows 524288] [--batch 8192] [--runs 7] [--folder FOLDER] [--only-memory]

The claims: batches (dense matrix, feature-major ids, checks, shuffled rows) take little more CPU time than a bare scan
of the same file. Memory does not grow with the data set: it is bounded by a few row groups.

Files are generated with one row group per 2^17 rows (2^15 for lists), snappy:

    flat     13 float32 and 26 int64 columns; ids even in [0, 1 million)
    skewed   the same with ids by a power law, which Parquet stores as dictionaries
    list     26 list<int64> columns with 0 to 6 ids

The bare scan decodes record batches of the batch size on one thread, and drops them. Readers take turns, so that other
load on the machine meets all alike. Printed are medians of speeds, and of each turn's own ratio to the scan. CPU time
is that of the process, with the thread that reads ahead. Memory is growth of the resident set in a process of its own
over one pass with a slow consumer.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch

from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.power_law import power_law_ranks, scattered_ids
from tilerec.data.table_dataset import TableDataset

DENSE, SPARSE, TABLE_ROWS = 13, 26, 1_000_000
KINDS = ("flat", "skewed", "list")


def write(kind: str, path: Path, rows: int) -> None:
    """Write a generated file."""
    draw = np.random.default_rng(0)
    columns = {"label": pa.array((draw.random(rows) < 0.3).astype(np.float32))}
    for index in range(SPARSE):
        if kind == "list":
            lengths = draw.integers(0, 7, rows)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = pa.array(draw.integers(0, TABLE_ROWS, int(offsets[-1])))
            columns[f"c{index}"] = pa.ListArray.from_arrays(pa.array(offsets), ids)
        elif kind == "skewed":
            columns[f"c{index}"] = pa.array(
                scattered_ids(power_law_ranks(draw.random(rows), TABLE_ROWS, 1.05), TABLE_ROWS)
            )
        else:
            columns[f"c{index}"] = pa.array(draw.integers(0, TABLE_ROWS, rows))
    if kind != "list":
        for index in range(DENSE):
            columns[f"d{index}"] = pa.array(draw.random(rows, dtype=np.float32))
    group = 1 << 15 if kind == "list" else 1 << 17
    parquet.write_table(pa.table(columns), path, row_group_size=group, compression="snappy")


def roles(kind: str, ids: str) -> Columns:
    """Return the roles of the columns; ids are row numbers, or hashed."""
    listed = "list" if kind == "list" else "single"
    return Columns(
        labels=(LabelColumn("label"),),
        dense=() if kind == "list" else tuple(DenseColumn(f"d{index}") for index in range(DENSE)),
        ids=tuple(IdColumn(f"c{index}", kind=listed) for index in range(SPARSE)),  # type: ignore[arg-type]
        tables=tuple(TableRows(f"c{index}", TABLE_ROWS, ids) for index in range(SPARSE)),  # type: ignore[arg-type]
    )


def scan(path: Path, batch: int) -> int:
    """Decode a file without use of the values; return its rows."""
    batches = parquet.ParquetFile(path).iter_batches(batch, use_threads=False)
    return sum(decoded.num_rows for decoded in batches)


def read(data: TableDataset, batch: int) -> int:
    """Read a pass; return its rows."""
    return sum(one.batch_size for one in data.train(batch))


def rows_per_cpu_second(action: Callable[[], int]) -> float:
    """Return the rows of an action per second of the process's CPU time."""
    start = time.process_time()
    rows = action()
    return rows / (time.process_time() - start)


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Print thousands of rows per CPU second, and ratios."""
    print(f"{'file':8s} {'reader':34s} {'k rows/CPU-s':>12s} {'beside the scan':>16s}")
    for kind in KINDS:
        path = folder / f"{kind}.parquet"
        write(kind, path, options.rows)
        small = 1 << 14
        readers: dict[str, Callable[[], int]] = {"iter_batches": lambda path=path: scan(path, options.batch)}
        for name, ids, window in (
            ("row numbers", "rows", small),
            ("row numbers, window of 2^17 rows", "rows", 1 << 17),
            ("hashed ids", "hash", small),
        ):
            data = TableDataset(ParquetGroups(path), roles(kind, ids), shuffle_rows=window)
            readers[name] = lambda data=data: read(data, options.batch)
        speeds: dict[str, list[float]] = {name: [] for name in readers}
        for action in readers.values():
            action()
        for _ in range(options.runs):
            for name, action in readers.items():
                speeds[name].append(rows_per_cpu_second(action))
        for name, found in speeds.items():
            ratios = sorted(one / other for one, other in zip(found, speeds["iter_batches"], strict=True))
            median = statistics.median(found)
            print(
                f"{kind:8s} {name:34s} {median / 1e3:12.0f} {statistics.median(ratios):10.2f}x"
                f"  ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


def memory(path: str, kind: str, files: int, batch: int) -> None:
    """Print the growth of the resident set, in MB, over a pass on copies of a file with a slow consumer."""
    copies = sorted(str(each) for each in Path(path).parent.glob(f"{kind}-copy*.parquet"))
    data = TableDataset(ParquetGroups(copies[:files]), roles(kind, "rows"), shuffle_rows=1 << 14)
    most = before = resident()
    for number, _ in enumerate(data.train(batch)):
        if number % 64 == 0:
            time.sleep(0.02)
        most = max(most, resident())
    print(round((most - before) / 2**20))


def resident() -> int:
    """Return the bytes of the resident set."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def compare_memory(folder: Path, batch: int) -> None:
    """Print the growth for one, four and sixteen files of equal size."""
    print(f"\n{'file':8s} {'row group':>10s}   growth of the resident set over a pass")
    for kind in ("flat", "list"):
        path = folder / f"{kind}.parquet"
        for number in range(16):
            copy = folder / f"{kind}-copy{number:02}.parquet"
            if not copy.exists():
                copy.hardlink_to(path)
        group = parquet.ParquetFile(path).read_row_group(0).nbytes / 2**20
        found = []
        for files in (1, 4, 16):
            run = [sys.executable, __file__, "--memory", str(path), kind, str(files), "--batch", str(batch)]
            found.append(
                f"{files} files {subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()} MB"
            )
        print(f"{kind:8s} {group:7.0f} MB   {', '.join(found)}")


def main() -> None:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1 << 19)
    parser.add_argument("--batch", type=int, default=1 << 13)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--only-memory", action="store_true", help="leave the CPU times out")
    parser.add_argument("--memory", nargs=3, metavar=("FILE", "KIND", "FILES"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        path, kind, files = options.memory
        memory(path, kind, int(files), options.batch)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.only_memory:
            for kind in ("flat", "list"):
                write(kind, folder / f"{kind}.parquet", options.rows)
        else:
            compare(folder, options)
        compare_memory(folder, options.batch)


if __name__ == "__main__":
    main()
