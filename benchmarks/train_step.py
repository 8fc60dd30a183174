"""Whole training steps beside TorchRec: reading, tables, dense part, on 1 and 2 ranks over gloo on CPU.

    python benchmarks/train_step.py --peer .venv-peer/bin/python [--cases dlrm,dcn,…] [--ranks 1,2] [--mkl]

A step reads a batch from Parquet, looks its ids up, runs the dense part forward and backward, averages dense gradients
over the ranks, and updates tables and dense parameters. Both sides have the same model, the same initial values, the
same optimizers (row-wise Adagrad in the backward pass for tables, `torch.optim.Adagrad` with its defaults for dense
parameters), the same placement of tables (table t on rank t mod W) and the same number of threads: 2 on one rank, 1 on
each of two. Both run in `DistributedModelParallel`, once in a plain loop and once in `TrainPipelineSparseDist`.

Reading: both read the same files, each rank its own row groups. `train_step_rank.py` has the peer's reader.

Threads of tilerec's processes wait as those of `tilerec train` do (`command_policy.py`); TorchRec's wait by libgomp's
default, which was not slower for it.

Before any timing, both sides train on the same batches in the order of the files, in both loops and with MKL. The
script stops if a loss of a rank differs by more than `--tolerance`. Then the two worlds of processes take turns of
`--seconds` each, at most 20 steps. A wall time is that of the slowest rank, processor time the mean over ranks, with
all threads; ratios are medians of the turns' own ratios, with the quartiles behind them.

On processors with AVX-512 that are not Intel's, tilerec's dense layers multiply with oneDNN (`modules/linear.py`), and
torch's `nn.Linear` with MKL. `--mkl` turns oneDNN off, so that both sides spend the same time in matrix products.

Cases
    dlrm        26 tables of 100,000 x 64, one id per feature, 13 dense features, MLPs 512-256-64 and 512-512-256-1
    dcn         the same with 3 low-rank crosses of rank 64 in place of the dot products
    dlrm_hot    bags of MLPerf's DLRM-DCNv2 (214 ids per sample), rows of 128, MLPs 512-256-128 and 512-512-256-1
    dcn_hot     the same with 3 low-rank crosses of rank 64
    mlperf      the dense part of MLPerf's DLRM-DCNv2: rank 512, MLPs 512-256-128 and 1024-1024-512-256-1

`--products` adds a row with a step's matrix products alone, computed by MKL in tilerec's processes in the same turns,
over TorchRec's time in the first loop: a bound for the ratio of a side that multiplies with MKL.

`--profile` adds the shares of operators in the time of all operators, by torch's profiler on rank 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from lookup import machine, numbers, words  # noqa: E402
from sharded_step import World  # noqa: E402
from train_step_rank import Job  # noqa: E402

from tilerec.command_policy import wait_briefly  # noqa: E402
from tilerec.data.power_law import power_law_ranks, scattered_ids  # noqa: E402
from tilerec.ops.runtime.cpu.library import status  # noqa: E402

MULTI_HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
DENSE, TABLES = 13, 26
ROWS_PER_GROUP = 1 << 14
CHECKED = 6  # batches of each loop whose losses are compared
PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")


def case_of(name: str, options: argparse.Namespace, ranks: int, files: dict[str, list[str]]) -> Job:
    """Return a case by its name."""
    hot = name in ("dlrm_hot", "dcn_hot", "mlperf")
    dim = 128 if hot else 64
    return Job(
        model="DLRM" if name.startswith("dlrm") else "DLRM_DCN",
        files=files["hot" if hot else "flat"],
        lengths=MULTI_HOT if hot else [1] * TABLES,
        rows=options.rows,
        dim=dim,
        dense=DENSE,
        bottom=[512, 256, dim],
        top=[1024, 1024, 512, 256, 1] if name == "mlperf" else [512, 512, 256, 1],
        cross=[3, 512 if name == "mlperf" else 64],
        batch=options.batch,
        tiling=options.tiling,
        ranks=ranks,
        onednn=not options.mkl,
    )


def write(folder: Path, kind: str, rows: int, table_rows: int) -> list[str]:
    """Write four generated files with ids by a power law; return their paths."""
    draw = np.random.default_rng(0)
    paths = []
    for number in range(4):
        columns = {"label": pa.array((draw.random(rows // 4) < 0.3).astype(np.float32))}
        for k in range(DENSE):
            columns[f"d{k}"] = pa.array(np.log1p(draw.exponential(size=rows // 4)).astype(np.float32))
        for t, length in enumerate(MULTI_HOT if kind == "hot" else [1] * TABLES):
            ids = scattered_ids(power_law_ranks(draw.random(rows // 4 * length), table_rows, 1.05), table_rows)
            values = pa.array((ids + 7919 * t) % table_rows)
            if kind == "hot":
                offsets = pa.array(np.arange(rows // 4 + 1, dtype=np.int32) * length)
                values = pa.ListArray.from_arrays(offsets, values)
            columns[f"c{t}"] = values
        path = folder / f"{kind}{number}.parquet"
        parquet.write_table(pa.table(columns), path, row_group_size=ROWS_PER_GROUP, compression="snappy")
        paths.append(str(path))
    return paths


def check(ours: World, peer: World, tolerance: float) -> float:
    """Return the largest difference of the losses of both sides; stop above the tolerance."""
    worst = 0.0
    for number, loop in enumerate(("plain", "pipeline")):
        request = {"loop": loop, "first": number * CHECKED, "count": CHECKED}
        own, theirs = (world.ask("losses", **request) for world in (ours, peer))
        for rank, (a, b) in enumerate(zip(own, theirs, strict=True)):
            apart = [abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)]
            worst = max(worst, *apart)
            if not max(apart) <= tolerance:
                raise SystemExit(
                    f"{loop}, rank {rank}: losses {a['losses']} and {b['losses']}; not timed ({worst:.1e})"
                )
    return worst


def turn(world: World, loop: str, steps: int) -> tuple[float, float]:
    """Return wall ms of the slowest rank and the mean processor ms of a step."""
    answers = world.ask("products" if loop == "products" else "steps", loop=loop, steps=steps)
    return max(a["wall"] for a in answers), statistics.mean(a["processor"] for a in answers)


def ratio(turns: list[dict[tuple[str, str], tuple[float, float]]], loop: str, other: str, part: int) -> str:
    """Return the median of ours / TorchRec over the turns, with the quartiles."""
    found = [one["ours", loop][part] / one["peer", other][part] for one in turns]
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def compare(name: str, ours: World, peer: World, options: argparse.Namespace) -> None:
    """Measure a case that both worlds have built, and print a row for each loop."""
    turns: list[dict[tuple[str, str], tuple[float, float]]] = []
    worlds = {"ours": ours, "peer": peer}
    steps = 3
    for number in range(options.turns + 1):
        order = list(worlds) if number % 2 else list(worlds)[::-1]
        found = {(side, loop): turn(worlds[side], loop, steps) for loop in options.loops for side in order}
        if options.products:
            found["ours", "products"] = turn(ours, "products", steps)
        if number:  # the first fills caches, readers and pipelines
            turns.append(found)
        else:
            steps = max(2, min(20, int(1e3 * options.seconds / max(wall for wall, _ in found.values()))))
    products = [("products", options.loops[0])] if options.products else []
    for loop, other in [*zip(options.loops, options.loops, strict=True), *products]:
        keys = (("ours", loop), ("peer", other))
        ms = [statistics.median(one[key][part] for one in turns) for part in (0, 1) for key in keys]
        cells = [name, str(len(ours.processes)), loop, f"{ms[0]:.0f}", f"{ms[1]:.0f}", ratio(turns, loop, other, 0)]
        print(f"| {' | '.join([*cells, f'{ms[2]:.0f}', f'{ms[3]:.0f}', ratio(turns, loop, other, 1)])} |", flush=True)


def parts(name: str, world: World, lines: int) -> None:
    """Print the largest shares of operators in a step of a world."""
    found = world.ask("profile", loop="plain", steps=5)[0]["operators"]
    total = sum(found.values())
    shares = {"matrix products": sum(found.pop(key, 0.0) for key in PRODUCTS), **found}
    largest = sorted(((ms, key) for key, ms in shares.items()), reverse=True)[:lines]
    print(f"\n{name}, {world.who}: {', '.join(f'{key} {100 * ms / total:.0f} %' for ms, key in largest)}\n", flush=True)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=os.environ.get("TILEREC_PEER_PYTHON", ".venv-peer/bin/python"))
    parser.add_argument("--cases", type=words, default=["dlrm", "dcn", "dlrm_hot", "dcn_hot", "mlperf"])
    parser.add_argument("--loops", type=words, default=["plain", "pipeline"])
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--batch", type=int, default=2048, help="samples of a rank")
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--samples", type=int, default=1 << 17, help="of the files")
    parser.add_argument("--tiling", default="table-wise", choices=["table-wise", "row-wise", "column-wise"])
    parser.add_argument("--mkl", action="store_true", help="tilerec without oneDNN: both sides multiply with MKL")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--tolerance", type=float, default=2e-4)
    parser.add_argument("--products", action="store_true", help="also time the matrix products alone")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="the largest operators of a step")
    return parser.parse_args()


def main() -> None:
    """Compare all cases."""
    options = parse()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        kinds = {"flat" if case in ("dlrm", "dcn") else "hot" for case in options.cases}
        files = {kind: write(folder, kind, options.samples, options.rows) for kind in kinds}
        print(f"- machine: {machine()}; load {os.getloadavg()[0]:.1f}")
        print(f"- ours: torch {torch.__version__}, pyarrow {pa.__version__}, {status()}")
        print(f"- recipe: `{' '.join(['python', *sys.argv])}`, {time.strftime('%Y-%m-%d')}")
        for count, ranks in enumerate(options.ranks):
            room = folder / str(ranks)
            room.mkdir()
            threads = 2 if ranks == 1 else 1
            script = "train_step_rank.py"
            waiting: dict[str, str] = {}
            wait_briefly(waiting)
            ours = World("tilerec", sys.executable, script, ranks, room, ["tilerec"], threads, waiting)
            peer = World("TorchRec", options.peer, script, ranks, room, ["torchrec"], threads)
            try:
                if not count:
                    hello = peer.ask("hello")[0]
                    print(f"- peer: torchrec {hello['torchrec']}, torch {hello['torch']}, pyarrow {hello['pyarrow']}\n")
                    head = ["case", "ranks", "loop", "ours ms", "TorchRec ms", "ours / TorchRec", "ours processor ms"]
                    print(f"| {' | '.join([*head, 'TorchRec processor ms', 'ours / TorchRec'])} |\n{'|---' * 9}|")
                for case in options.cases:
                    job = dataclasses.asdict(case_of(case, options, ranks, files))
                    worlds: list[Any] = [ours, peer]
                    for world in worlds:
                        world.ask("build", job=job)
                    worst = check(ours, peer, options.tolerance)
                    print(f"<!-- {case}, {ranks} ranks: losses at most {worst:.1e} apart -->", flush=True)
                    compare(case, ours, peer, options)
                    for world in worlds:
                        if options.profile:
                            parts(case, world, options.profile)
                        world.ask("drop")
            finally:
                ours.close()
                peer.close()


if __name__ == "__main__":
    main()
