"""Lookups and fused updates against FBGEMM's CPU kernels and ATen's `embedding_bag`, in one run, taking turns.

    python benchmarks/lookup.py --peer .venv-peer/bin/python [--quick] [--section pooled ...] [--csv FILE]

Two processes: this one, and `peer.py` under the peer's Python. For every case both build the same tables, and each
result is compared with a float64 oracle. Only then are short rounds timed, tilerec's and the peers' in turn, so that
all run under the same conditions. A time is the median over the rounds; a ratio (peer / tilerec, above 1: tilerec is
faster) the median of the rounds' own ratios.

Sections
  pooled          forward of pooled lookups (sums)
  sequence        forward of unpooled lookups
  pooled-train    forward, and backward + update, per optimizer
  sequence-train  the same, unpooled
  overhead        one call on 26 tables, 64 samples, one id per bag: mostly the cost of a call

Tables are allocated as each library does: tilerec's flat, in 2 MiB pages if the system provides them.

GB/s counts the bytes that a perfect implementation must move once: distinct rows, output, ids. Beside it is the speed
of a copy of 256 MiB, read and written, of the same run.

Legend: T tables, E rows, D columns, B samples, L ids per bag, N = T * B * L ids.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from peer import DTYPES, EPS, LR, PERIOD, Case, fill_table, result_of, table_values, timed  # noqa: E402

from tilerec.ops import backends  # noqa: E402
from tilerec.ops.runtime.cpu.library import status  # noqa: E402
from tilerec.storage.flat_storage import flat_memory  # noqa: E402

SECTIONS = ("pooled", "sequence", "pooled-train", "sequence-train", "overhead")
PEER_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
HYPER = {
    "sgd": [LR, 1.0, 0.0, 0.0, 0.0, 0.0],
    "adagrad": [LR, 1.0, 0.0, 0.0, EPS, 0.0],
    "rowwise_adagrad": [LR, 1.0, 0.0, 0.0, EPS, 0.0, 0.0],
    "adam": [LR, 1.0, 0.0, 0.0, EPS, 0.9, 0.999, 0.0, 0.0],
}


class Ours:
    """The ops of this package, called as the modules call them."""

    def __init__(self, case: Case, data: dict[str, Tensor]) -> None:
        self.case, self.data, self.out = case, data, torch.empty(0)
        T, D, B = case.tables, case.dim, case.batch
        self.tables = flat_memory([(case.rows, D)] * T, DTYPES[case.dtype], "cpu")  # as a collection's
        for t, table in enumerate(self.tables):
            fill_table(table, t)
        self.order, self.steps = list(range(T)), [0] * T
        self.no_sinks, self.names = (
            torch.empty(0, dtype=torch.int64),
            ",".join(f"f{t}@t{t}" for t in range(T)),
        )
        per_table = B * case.length
        self.starts = torch.arange(T + 1) * per_table
        if case.pooled:
            self.record = [[t * B for t in self.order], [B] * T, [t * D for t in self.order], [T * D] * T]
        else:
            at = [t * per_table for t in self.order]
            self.record = [at, [per_table] * T, [a * D for a in at], [D] * T]
        slots = {"adagrad": [(case.rows, D)], "rowwise_adagrad": [(case.rows,)], "adam": [(case.rows, D)] * 2}
        self.slots = [torch.zeros(shape) for _ in self.order for shape in slots.get(case.optimizer, [])]

    def stages(self) -> list[Callable[[], Any]]:
        case, data, ops = self.case, self.data, torch.ops.tilerec
        zeros, dtype = [0] * case.tables, DTYPES[case.output]

        def pooled() -> None:
            self.out = ops.pooled_lookup(
                self.tables, self.no_sinks, data["ids"], data["offsets"], None, self.order, self.order, zeros,
                [case.batch], dtype, self.names,
            )[0]  # fmt: skip

        def sequence() -> None:
            self.out = ops.sequence_lookup(
                self.tables, self.no_sinks, data["ids"], self.starts, self.order, dtype, self.names
            )[0]

        def update() -> None:
            self.steps = [s + 1 for s in self.steps]
            ops.update_rows_(
                self.tables, self.slots, data["grad"], data["ids"], data["offsets"] if case.pooled else None, None,
                self.order, *self.record, zeros, case.optimizer, HYPER[case.optimizer], self.steps, zeros + zeros,
                zeros, zeros,
            )  # fmt: skip

        forward = pooled if case.pooled else sequence
        return [forward, update] if case.train else [forward]


class Peer:
    """The process under the peer's Python."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # FBGEMM's import prints warnings about GPUs; an error shows as a missing answer below.
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("peer.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the peer process ended (exit code {self.process.wait()}); its messages are above")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def make_data(case: Case) -> dict[str, Tensor]:
    """Make ids, offsets, output gradient, and the distinct rows per table."""
    generator = torch.Generator().manual_seed(7)
    T, E, per_table = case.tables, case.rows, case.batch * case.length
    if case.ids == "uniform":
        ids = torch.randint(0, E, (T, per_table), generator=generator)
    else:
        share = torch.arange(1, E + 1, dtype=torch.float64) ** -1.05
        draws = torch.rand(T, per_table, generator=generator).double()
        rank = torch.searchsorted(share.cumsum(0) / share.sum(), draws)
        # Scrambled: popular rows lie anywhere. The factor is a prime, so no two ranks get the same row.
        ids = (rank.clamp_(max=E - 1) * 2654435761 + torch.arange(T)[:, None] * 7919) % E
    offsets = torch.arange(T * case.batch + 1) * case.length
    data = {"ids": ids.reshape(-1), "offsets": offsets}
    if case.train:
        shape = (case.batch, T * case.dim) if case.pooled else (T * per_table, case.dim)
        data["grad"] = torch.randn(shape, generator=generator)
    return data | {"rows": [row.unique() for row in ids]}  # type: ignore[dict-item]


def oracle(case: Case, data: dict[str, Any]) -> list[Tensor]:
    """Return the expected result of `result_of`, with sums in float64."""
    T, B, L, D = case.tables, case.batch, case.length, case.dim
    outs, updated = [], []
    for t, (ids, rows) in enumerate(zip(data["ids"].chunk(T), data["rows"], strict=True)):
        values, columns = table_values(t, DTYPES[case.dtype]), torch.arange(D)
        looked = values[(ids[:, None] * D + columns) % PERIOD].double()
        outs.append(looked.view(B, L, D).sum(1) if case.pooled else looked)
        if not case.train:
            continue
        w = values[(rows[:, None] * D + columns) % PERIOD].double()
        grad = data["grad"]
        each = grad[:, t * D : (t + 1) * D].repeat_interleave(L, 0) if case.pooled else grad.chunk(T)[t]
        g = torch.zeros_like(w).index_add_(0, torch.searchsorted(rows, ids), each.double())
        if case.optimizer == "sgd":
            w -= LR * g
        elif case.optimizer == "adagrad":
            w -= LR * g / (g.abs() + EPS)
        elif case.optimizer == "rowwise_adagrad":
            w -= LR * g / ((g * g).mean(1, keepdim=True).sqrt() + EPS)
        elif case.optimizer == "adam":
            w -= LR * g / (g.abs() + EPS)
        updated.append(w)
    return [torch.cat(outs, 1 if case.pooled else 0).float(), *[w.float() for w in updated]]


def check(who: str, case: Case, got: list[Tensor], want: list[Tensor]) -> None:
    """Stop the run if a result is wrong; tolerances are those of the number types."""
    step = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        unit = max(step[case.output] if i == 0 else step[case.dtype], 1e-6)
        # The sign of a gradient that rounds to 0 decides an Adagrad step: tolerate a few such numbers.
        wrong = (a - b).abs() > 2 * unit * (b.abs() + case.length + 1)
        if float(wrong.double().mean()) > (0 if i == 0 else 1e-4) or not bool(a.isfinite().all()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise SystemExit(f"{who} is wrong in {case}: result {i} at {at}: {a[at]}, wanted {b[at]}; not timed")


def compulsory_bytes(case: Case, data: dict[str, Any]) -> int:
    size = {"fp32": 4, "bf16": 2, "fp16": 2}
    distinct = sum(r.numel() for r in data["rows"])
    outputs = case.tables * case.batch * (1 if case.pooled else case.length) * case.dim
    return distinct * case.dim * size[case.dtype] + outputs * size[case.output] + data["ids"].numel() * 8


def copy_speed(threads: int) -> float:
    """Return the GB/s of a copy of 256 MiB, read plus written; the best of a few."""
    torch.set_num_threads(threads)
    a, b = torch.ones(1 << 26), torch.zeros(1 << 26)
    return 2 * a.numel() * 4 / min(timed([lambda: b.copy_(a)], 1)[0] for _ in range(7)) / 1e9


@dataclasses.dataclass(frozen=True)
class Line:
    """One printed row."""

    case: Case
    stage: str
    ours_us: float
    fbgemm_us: float | None
    fbgemm_ratio: float | None
    aten_us: float | None
    aten_ratio: float | None
    gigabytes: float | None
    remark: str

    def cells(self) -> list[str]:
        def number(x: float | None, digits: int) -> str:
            return "" if x is None else f"{x:.{digits}f}"

        c = self.case
        return [
            c.kind, f"{self.stage} {c.optimizer}".strip(),
            str(c.tables), str(c.rows), str(c.dim), c.dtype, c.output, str(c.batch), str(c.length),
            c.ids, str(c.threads), number(self.ours_us, 0), number(self.fbgemm_us, 0), number(self.fbgemm_ratio, 2),
            number(self.aten_us, 0), number(self.aten_ratio, 2), number(self.gigabytes, 1), self.remark,
        ]  # fmt: skip


HEADER = [
    "section", "stage", "T", "E", "D", "table", "out", "B", "L", "ids", "threads", "ours us", "FBGEMM us",
    "FBGEMM/ours", "ATen us", "ATen/ours", "GB/s", "remark",
]  # fmt: skip


class Bench:
    def __init__(self, peer: Peer, folder: Path, rounds: int, round_seconds: float) -> None:
        self.peer, self.folder, self.rounds, self.round_seconds = peer, folder, rounds, round_seconds

    def run(self, case: Case) -> Iterator[Line]:
        """Check and time one case; a peer without it leaves its column empty and adds a remark."""
        data = make_data(case)
        data_path, result_path = str(self.folder / "data.pt"), str(self.folder / "result.pt")
        torch.save(data, data_path)
        torch.set_num_threads(case.threads)
        want = oracle(case, data)
        ours = Ours(case, data)
        check("tilerec", case, result_of(ours, case, data["rows"]), want)  # type: ignore[arg-type]
        remarks = []
        seconds: dict[str, list[list[float]]] = {}
        ratios: dict[str, list[list[float]]] = {}
        mine: list[list[float]] = []
        for who in ("fbgemm", "aten"):
            answer = self.peer.ask(
                "prepare", who=who, case=dataclasses.asdict(case), data=data_path, result=result_path
            )
            if "lacks" in answer:
                remarks.append(answer["lacks"])
                continue
            check(who, case, torch.load(result_path), want)
            stages, theirs = ours.stages(), []
            once = sum(timed(stages, 2)) + 1e-6
            repeats = max(1, min(1000, int(self.round_seconds / once)))
            once = sum(self.peer.ask("time", repeats=2)["seconds"]) + 1e-6
            their_repeats = max(1, min(1000, int(self.round_seconds / once)))
            pairs = []
            for _ in range(self.rounds):
                pairs.append((timed(stages, repeats), self.peer.ask("time", repeats=their_repeats)["seconds"]))
            mine += [a for a, _ in pairs]
            theirs = [b for _, b in pairs]
            seconds[who] = theirs
            ratios[who] = [[y / x for x, y in zip(a, b, strict=True)] for a, b in pairs]
        if not mine:
            once = sum(timed(ours.stages(), 2)) + 1e-6
            repeats = max(1, min(1000, int(self.round_seconds / once)))
            mine = [timed(ours.stages(), repeats) for _ in range(self.rounds)]
        for i, stage in enumerate(["forward", "backward+update"] if case.train else ["forward"]):

            def middle(table: dict[str, list[list[float]]], who: str, scale: float, i: int = i) -> float | None:
                return statistics.median(row[i] for row in table[who]) * scale if who in table else None

            us = statistics.median(row[i] for row in mine) * 1e6
            moved = compulsory_bytes(case, data) / us / 1e3 if i == 0 else None
            yield Line(
                case, stage, us, middle(seconds, "fbgemm", 1e6), middle(ratios, "fbgemm", 1),
                middle(seconds, "aten", 1e6), middle(ratios, "aten", 1), moved, "; ".join(remarks),
            )  # fmt: skip


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the grid, tables of one shape together."""
    for section, dim, dtype in itertools.product(options.section, options.dims, options.dtypes):
        if section == "overhead":
            if (dim, dtype) == (options.dims[0], options.dtypes[0]):
                yield Case("pooled", 26, 1000, 16, "fp32", 64, 1, "uniform", 1)
            continue
        rows = options.rows or min(500_000, 500_000 * 64 // dim)
        base = Case(section, options.tables, rows, dim, dtype, options.batch, 1, "zipf", 1)
        outputs = ["fp32"] if dtype == "fp32" else ["fp32", dtype]
        if base.train and dtype != "fp32" and not options.half_train:
            continue
        for length, ids, threads in itertools.product(options.lengths, options.ids, options.threads):
            case = dataclasses.replace(base, length=length, ids=ids, threads=threads)
            if not case.pooled and case.tables * case.batch * length * dim * 4 > options.most_mib << 20:
                continue
            if base.train:
                for optimizer in options.optimizers:
                    yield dataclasses.replace(case, optimizer=optimizer)
            else:
                for output in outputs:
                    yield dataclasses.replace(case, output=output)


def words(text: str) -> list[str]:
    return [w for w in text.split(",") if w]


def numbers(text: str) -> list[int]:
    return [int(w) for w in words(text)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=os.environ.get("TILEREC_PEER_PYTHON", ".venv-peer/bin/python"))
    parser.add_argument("--quick", action="store_true", help="dims 64, fp32, lengths 1 and 20, Zipf, fewer rounds")
    parser.add_argument("--section", action="append", choices=SECTIONS)
    parser.add_argument("--dims", type=numbers, default=[16, 32, 64, 128, 256])
    parser.add_argument("--dtypes", type=words, default=["fp32", "bf16", "fp16"])
    parser.add_argument("--lengths", type=numbers, default=[1, 20, 100])
    parser.add_argument("--ids", type=words, default=["zipf", "uniform"])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--optimizers", type=words, default=[*PEER_OPTIMIZERS, "adam"])
    parser.add_argument("--half-train", action="store_true", help="training sections for bf16 and fp16 tables too")
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=0, help="default: 500k, fewer above 64 columns (1 GB of fp32)")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--most-mib", type=int, default=256, help="skip unpooled outputs larger than this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-seconds", type=float, default=0.05)
    parser.add_argument("--csv", type=Path, help="write the rows there too")
    if "--quick" in sys.argv:  # its values are defaults too: an explicit option still counts
        parser.set_defaults(dims=[64], dtypes=["fp32"], lengths=[1, 20], ids=["zipf"], rounds=5)
    options = parser.parse_args()
    options.section = options.section or list(SECTIONS)
    return options


def machine() -> str:
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = f"{names[0]} x {len(names)}" if names else model
    return f"{model}, {platform.system()} {platform.release()}"


def main() -> None:
    options = parse()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        peer = Peer(options.peer, Path(folder))
        hello = peer.ask("hello")
        copies = ", ".join(f"{copy_speed(n):.1f} GB/s on {n} thread{'s' * (n > 1)}" for n in options.threads)
        print(f"- machine: {machine()}; copy: {copies}")
        print(f"- ours: torch {torch.__version__}, Python {platform.python_version()}, {status()}")
        print(f"- peer: fbgemm-gpu-cpu {hello['fbgemm']}, torch {hello['torch']}, Python {hello['python']}")
        print(f"- FBGEMM on CPU lacks: bf16 tables and outputs; every optimizer but {', '.join(PEER_OPTIMIZERS)} "
              "among ours; ATen: fused updates (torch.optim with sparse gradients is timed)")  # fmt: skip
        print(f"- recipe: `{' '.join(['python', *sys.argv])}`, {time.strftime('%Y-%m-%d')}; "
              f"{options.rounds} rounds of {options.round_seconds} s in turn, medians\n")  # fmt: skip
        if not backends.NATIVE_CPU:
            print("**the native library is not loaded: these are the reference kernels' times**\n")
        print("| " + " | ".join(HEADER) + " |")
        print("|" + "---|" * len(HEADER), flush=True)
        bench = Bench(peer, Path(folder), options.rounds, options.round_seconds)
        lines = []
        try:
            for case in cases(options):
                for line in bench.run(case):
                    lines.append(line)
                    print("| " + " | ".join(line.cells()) + " |", flush=True)
        finally:
            peer.close()
            if options.csv:
                with options.csv.open("w", newline="") as file:
                    csv.writer(file).writerows([HEADER, *[line.cells() for line in lines]])


if __name__ == "__main__":
    main()
