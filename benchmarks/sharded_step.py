"""A training step of sharded tables, beside TorchRec, over gloo on CPU.

    python benchmarks/sharded_step.py --peer .venv-peer/bin/python [--quick] [--tilings row-wise,…] [--csv FILE]
    python benchmarks/sharded_step.py --unpooled --tables 8 --dims 64 --lengths 20 --batch 1024    a row per id
    python benchmarks/sharded_step.py --stages [--profile 15] [--tilings …]     tilerec alone: parts of a step's time
    python benchmarks/sharded_step.py --ranks 4 --hosts 2 --tilings table-row-wise,grid                    tilerec alone

The sparse part of a step: forward, backward from a given gradient of the output, SGD update. Two worlds of processes,
tilerec's and TorchRec's (`sharded_peer.py` in the peer's environment), each one process per rank with one thread, take
turns in short rounds over the same batches. A time is the median over rounds of the slowest rank's mean step; a ratio
the median of the rounds' own ratios.

Every result is checked before it is timed. After one step from the same tables, each rank's output and every touched
row of every tile must equal a float64 oracle: SGD with the gradients of all ranks summed and divided by W, as DDP does.
Tolerances are a few roundings of the sums. The tiles must cover the tables, and no other row may change.

Tilings, the same on both sides: table-wise (table t on rank t mod W), column-wise (D / W columns on each rank),
row-wise (E / W rows on each rank), data-parallel (whole on every rank; tilerec with the optimizer attached, TorchRec
with the step of torch.optim.SGD). TorchRec's plans are made by hand. On 2 ranks table-row-wise and grid are one of
these (on one host row-wise, on two hosts table-wise and column-wise), so they need `--ranks 4 --hosts 2`. Hosts are
only numbers then and all links are equally fast, so the sums within hosts show their cost rather than their gain.

"bf16": tilerec with rows and gradients in bf16 on the wire. Replicas exchange gradients as they are summed, so
data-parallel has no such column.

Stages (tilerec, mean over ranks of the medians over steps; `bound` beside each)
  route      ids sorted by owner                    header     sizes
  ids        to the owners                          lookup     owners read and pool
  rows       home                                   scatter    into the output
  gather     gradients out of the output's          rows'      gradients to the owners
  update     rows, in place                         rest       step minus all of these: Python, allocation, autograd
Collectives include the wait for the other rank. "processor ms" is the main thread's own time, without any wait.
"faults" are pages that the process used for the first time (new memory from the system; 1,000 cost about 0.5 ms or
more). Bounds: for a collective a raw one of gloo of the same bytes between the same processes (shared memory may be
faster: `TILEREC_SHARED_MEMORY=0` switches these off); for memory, bytes that must move once (distinct rows, ids,
outputs) at the speed of a large copy, all ranks copying at once; both the best of a few. Data that is still in a cache
may be faster than the latter. Replicas' ids and gradients travel at the same time: add the two.

Legend: W ranks, T tables, E rows, D columns, B samples of a rank, L ids per bag, K batches.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import dataclasses
import itertools
import json
import os
import platform
import pstats
import resource
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from lookup import machine, numbers, words  # noqa: E402
from peer import LR, PERIOD, table_values  # noqa: E402
from sharded_peer import Case, Runner, Tile, serve  # noqa: E402

from tilerec.comms.process import ProcessGroupComms  # noqa: E402
from tilerec.modules.embedding import EmbeddingCollection  # noqa: E402
from tilerec.modules.embedding_bag import EmbeddingBagCollection  # noqa: E402
from tilerec.ops import backends  # noqa: E402
from tilerec.ops.runtime.cpu.library import status  # noqa: E402
from tilerec.optim.attach import apply_optimizer_in_backward  # noqa: E402
from tilerec.parallel.shard import shard  # noqa: E402
from tilerec.sharding.wire import RowWire  # noqa: E402
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor  # noqa: E402
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire  # noqa: E402
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig  # noqa: E402
from tilerec.spec.topology import Topology  # noqa: E402

TILINGS = ("table-wise", "column-wise", "row-wise", "data-parallel")
HOST_TILINGS = ("table-row-wise", "grid")
KINDS = {
    "table-wise": ShardingType.TABLE_WISE,
    "column-wise": ShardingType.COLUMN_WISE,
    "row-wise": ShardingType.ROW_WISE,
    "data-parallel": ShardingType.DATA_PARALLEL,
    "table-row-wise": ShardingType.TABLE_ROW_WISE,
    "grid": ShardingType.GRID_SHARD,
}


# ------------------------------------------------------------------------------------------------- a rank of ours


class Ours(Runner):
    """One rank of this package's sharded collection."""

    def __init__(self, case: Case, data: dict[str, Any], rank: int) -> None:
        super().__init__(case, data, rank)
        self.touched: list[Tensor] = data["touched"]
        config: Any = EmbeddingBagConfig if case.pooled else EmbeddingConfig
        configs = [config(case.rows, case.dim, f"t{t}", feature_names=[name]) for t, name in enumerate(self.names)]
        collection: Any = EmbeddingBagCollection if case.pooled else EmbeddingCollection
        module = collection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": LR})
        topology = Topology(case.ranks, "cpu", hosts=case.host_ranks)
        plan = {f"t{t}": placement(case, t) for t in range(case.tables)}
        self.module: Any = shard(module, plan={"": plan}, topology=topology, device="cpu")

    def step(self, k: int) -> Any:
        self.module.exchange.group.traffic.reset()
        features = KeyedJaggedTensor(self.names, self.ids[k], lengths=self.lengths)
        output = self.module(features)
        if not self.case.pooled:
            torch.autograd.backward([output[name].values() for name in self.names], self.id_grads)
            return output
        values = output.values()
        values.backward(self.grad)
        return values

    def tiles(self) -> Iterator[Tile]:
        yield from tiles_of(self.module)

    def sent(self) -> int | None:
        return int(self.module.exchange.group.traffic.total())  # counts for both channels

    def close(self) -> None:
        self.module.exchange.group.close()
        self.module.exchange.route_group.close()

    def distinct_bytes(self, *, updated: bool) -> int:
        """Return the bytes of rows that batch 0 reads here, or that all ranks' batches 0 update here."""
        case, total = self.case, 0
        own = [ids.unique() for ids in self.ids[0].view(case.tables, -1)]
        for tile in self.tiles():
            whole = tile.values.shape[0] == case.rows and case.tiling == "data-parallel"
            rows = own[tile.table] if whole and not updated else self.touched[tile.table]
            inside = (rows >= tile.row) & (rows < tile.row + tile.values.shape[0])
            total += int(inside.sum()) * tile.values.shape[1] * tile.values.element_size()
        return total


def tiles_of(module: Any) -> Iterator[Tile]:
    """Yield the tiles of a sharded collection with tables t0, t1, …"""
    for t, table in enumerate(module._leaves.tables):
        for tile, leaf in zip(table.tiles, table.leaves(), strict=False):
            yield Tile(t, tile.r0, tile.c0, leaf.detach())


def placement(case: Case, table: int) -> ParameterSharding:
    """Return the plan entry of a table."""
    ranks: list[int] | None = None
    if case.tiling == "table-wise":
        ranks = [table % case.ranks]
    elif case.tiling == "column-wise":
        ranks = list(range(case.ranks))
    elif case.tiling == "table-row-wise":
        ranks = case.host_ranks[table % case.hosts]
    return ParameterSharding(KINDS[case.tiling], ranks=ranks, wire=Wire(case.wire, case.wire))


# ------------------------------------------------------------------------------------------------------- stages

STAGE_OF_OP = {
    "distinct_ids": "route",
    "route_ids": "route",
    "pooled_lookup": "lookup",
    "place_rows_": "scatter",
    "expand_rows_": "scatter",
    "pick_rows_": "gather",
    "sum_rows_": "gather",
    "update_rows_": "update",
    "sum_row_gradients_of_tables": "sums",
}
STAGE_OF_CALL = {"gradients": "rows'", "rows in host": "rows in host", "gradients in host": "rows' in host"}
ORDER = [
    "route", "header", "ids", "lookup", "rows in host", "encode", "rows", "decode", "scatter", "gather", "rows'",
    "rows' in host", "replica counts", "sums", "replica rows", "replica ids", "replica gradients",
    "replica gradients, dense", "update", "rest", "step",
]  # fmt: skip


def _size(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _now() -> tuple[float, float, float]:
    """Return seconds elapsed, seconds of the main thread on the processor, page faults of the process."""
    return time.perf_counter(), time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Clock:
    """Times of the outermost ops and calls of a step, taken by wrapping them; made for one process."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}  # what `_now` counts
        self.bytes: dict[str, int] = {}  # of a memory stage, filled while `recording`
        self.raw: dict[str, Callable[[], object]] = {}  # a bare call of the same bytes
        self.recording = False
        self._inside = False
        for name, stage in STAGE_OF_OP.items():
            setattr(torch.ops.tilerec, name, self._op(getattr(torch.ops.tilerec, name), name, stage))
        wrap: Any = ProcessGroupComms
        for method, record in (
            ("_all_to_all", _raw_all_to_all), ("_exchange", _raw_exchange), ("_all_reduce_", _raw_all_reduce),
        ):  # fmt: skip
            setattr(wrap, method, self._call(getattr(wrap, method), record))
        wire: Any = RowWire
        for method in ("encode", "decode"):
            setattr(wire, method, self._op(getattr(wire, method), method, method))

    def add(self, stage: str, since: tuple[float, ...]) -> None:
        line = self.spent.setdefault(stage, [0.0, 0.0, 0.0])
        for i, now in enumerate(_now()):
            line[i] += now - since[i]

    def _op(self, op: Any, name: str, stage: str) -> Any:
        def timed(*args: Any) -> Any:
            if self._inside:
                return op(*args)
            self._inside = True
            since = _now()
            try:
                result = op(*args)
            finally:
                self.add(stage, since)
                self._inside = False
            if self.recording:
                self.bytes[stage] = self.bytes.get(stage, 0) + _moved(name, args, result)
            return result

        if hasattr(op, "default"):
            timed.default = op.default  # type: ignore[attr-defined]
        return timed

    def _call(self, method: Any, record: Any) -> Any:
        clock = self

        class Timed:
            def __init__(self, handle: Any, stage: str) -> None:
                self._handle, self._stage = handle, stage

            def wait(self) -> Any:
                since = _now()
                try:
                    return self._handle.wait()
                finally:
                    clock.add(self._stage, since)

        def timed(group: Any, name: str, *args: Any) -> Any:
            stage = STAGE_OF_CALL.get(name, name)
            if self.recording:
                self.raw[stage] = record(group, *args)
            since = _now()
            handle = method(group, name, *args)
            clock.add(stage, since)
            return Timed(handle, stage)

        return timed


def _moved(name: str, args: Any, result: Any) -> int:
    """Return the bytes that an op must read and write, without the tables' rows."""
    if name == "route_ids":
        return _size(args[0], args[1], *result)
    if name == "pooled_lookup":
        return _size(args[2], args[3], result[0])
    if name == "distinct_ids":
        return _size(args[0], args[1], *result)
    if name in ("place_rows_", "expand_rows_", "sum_rows_"):
        return _size(args[0], args[1])
    if name == "pick_rows_":
        return 2 * _size(args[0])
    if name == "update_rows_":
        return _size(args[2], args[3], args[4])
    if name == "sum_row_gradients_of_tables":
        # These tables' share of the gradients: each feature's bags of its table's width.
        return sum(n * args[5][t] for n, t in zip(args[8], args[6], strict=True)) * 4 + _size(*result)
    return _size(args[1], result)  # encode, decode: methods


def _raw_all_to_all(_group: Any, _output: Any, input: Tensor, into: Any, out: Any) -> Callable[[], object]:
    output, input, into, out = input.new_zeros(sum(into)), torch.zeros_like(input), list(into), list(out)
    return lambda: dist.all_to_all_single(output, input, into, out)


def _raw_exchange(group: Any, receives: Any, sends: Any) -> Callable[[], object]:
    receives = {rank: torch.zeros_like(t) for rank, t in receives.items() if rank != group.rank and t.numel()}
    sends = {rank: torch.zeros_like(t) for rank, t in sends.items() if rank != group.rank and t.numel()}

    def exchange() -> None:
        works = [dist.irecv(t, rank) for rank, t in receives.items()]
        works += [dist.isend(t, rank) for rank, t in sends.items()]
        for work in works:
            work.wait()  # type: ignore[union-attr]

    return exchange


def _raw_all_reduce(_group: Any, tensor: Tensor) -> Callable[[], object]:
    tensor = torch.zeros_like(tensor)
    return lambda: dist.all_reduce(tensor)


def copy_speed() -> float:
    """Return the bytes per second that this rank copies, read plus written, while all ranks do."""
    a, b = torch.ones(1 << 24), torch.zeros(1 << 24)
    best = 0.0
    for _ in range(5):
        dist.barrier()
        before = time.perf_counter()
        for _ in range(4):
            b.copy_(a)
        best = max(best, 4 * 2 * a.numel() * 4 / (time.perf_counter() - before))
    return best


def measure_stages(request: dict[str, Any], runners: dict[str, Runner]) -> dict[str, Any]:
    """Return the seconds of every stage, its bound if there is one, and of the step."""
    global CLOCK
    if CLOCK is None:
        CLOCK = Clock()
    clock, runner, steps = CLOCK, runners[request["name"]], request["steps"]
    assert isinstance(runner, Ours)
    clock.bytes.clear()
    clock.raw.clear()
    clock.recording = True
    runner.step(0)
    clock.recording = False
    if "lookup" in clock.bytes:
        clock.bytes["lookup"] += runner.distinct_bytes(updated=False)
    if "update" in clock.bytes:
        clock.bytes["update"] += 2 * runner.distinct_bytes(updated=True)
    speed = copy_speed()
    bounds = {stage: count / speed for stage, count in clock.bytes.items()}
    for stage in sorted(clock.raw):
        bursts = []
        for _ in range(5):
            before = time.perf_counter()
            for _ in range(5):
                clock.raw[stage]()
            bursts.append((time.perf_counter() - before) / 5)
        bounds[stage] = min(bursts)
    clock.raw.clear()
    lines: dict[str, list[list[float]]] = {}
    dist.barrier()
    for k in range(steps):
        clock.spent.clear()
        before = _now()
        runner.step(k % len(runner.ids))
        step = [now - then for now, then in zip(_now(), before, strict=True)]
        known = [sum(column) for column in zip(*clock.spent.values(), strict=True)]
        for stage, spent in clock.spent.items():
            lines.setdefault(stage, []).append(spent)
        lines.setdefault("rest", []).append([all_of - some for all_of, some in zip(step, known, strict=True)])
        lines.setdefault("step", []).append(step)
    return {
        "stages": {
            stage: [statistics.median(column) for column in zip(*times, strict=True)] for stage, times in lines.items()
        },
        "bounds": bounds,
        "copy": speed,
    }


CLOCK: Clock | None = None


def profile(request: dict[str, Any], runners: dict[str, Runner]) -> dict[str, Any]:
    """Return functions of rank 0 by their own processor time (waits have none); the other ranks run the same steps."""
    runner, steps = runners[request["name"]], request["steps"]
    profiler = cProfile.Profile(time.thread_time)
    dist.barrier()
    if runner.rank == 0:
        profiler.enable()
    for k in range(steps):
        runner.step(k % len(runner.ids))
    profiler.disable()
    if runner.rank:
        return {}
    stats: Any = pstats.Stats(profiler)
    root = str(Path(__file__).parent.parent) + "/"
    lines = []
    for (file, line, function), (_, calls, own, _, _) in stats.stats.items():
        where = function if file == "~" else f"{file.replace(root, '')}:{line} {function}"
        lines.append((1e3 * own / steps, calls / steps, where))
    return {"profile": sorted(lines, reverse=True)[: request["lines"]], "total": 1e3 * stats.total_tt / steps}


# -------------------------------------------------------------------------------------------------------- worlds


class World:
    """The ranks of one side, driven over pipes."""

    def __init__(
        self, who: str, python: str, file: str, ranks: int, folder: Path, more: list[str], threads: int = 1,
        settings: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`settings` are environment variables of this side alone."""
        self.who = who
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (settings or {})
        self.processes = []
        for rank in range(ranks):
            names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            own = environment | {k: str(v) for k, v in names.items()} | {"OMP_NUM_THREADS": str(threads)}
            script = str(Path(__file__).with_name(file))
            command = [
                *(python, "-W", "ignore", script, *more),
                *(str(rank), str(ranks), str(folder / f"rendezvous.{who}"), str(threads)),
            ]
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
            )

    def ask(self, do: str, **request: Any) -> list[dict[str, Any]]:
        """Return every rank's answer; a rank that fails ends the run at once."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            process.stdin.flush()
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self.processes):
                ready = selector.select(timeout=900)
                if not ready:
                    self.kill()
                    raise SystemExit(f"{self.who} did not answer '{do}' within 15 minutes")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    answer = json.loads(line) if line else {"failed": "the process ended"}
                    if "failed" in answer:
                        self.kill()
                        raise SystemExit(f"{self.who}, rank {key.data}, at '{do}': {answer['failed']} (more above)")
                    answers[key.data] = answer
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self.processes))]

    def seconds(self, name: str, steps: int) -> float:
        """Return the seconds of a step of the slowest rank."""
        return max(answer["seconds"] for answer in self.ask("time", name=name, steps=steps))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:
                continue
        for process in self.processes:
            process.wait()


# -------------------------------------------------------------------------------------------------- data and oracle


def make_data(case: Case, batches: int) -> dict[str, Any]:
    """Make `ids`: per rank K times [T * B * L]; `grad`: per rank [B, T * D]; `touched`: per table, of batches 0."""
    generator = torch.Generator().manual_seed(7)
    T, E, per_table = case.tables, case.rows, case.batch * case.length
    share = (torch.arange(1, E + 1, dtype=torch.float64) ** -1.05).cumsum(0)
    ids = []
    for _ in range(case.ranks):
        own = []
        for _ in range(batches):
            draws = torch.rand(T, per_table, generator=generator).double()
            place = torch.searchsorted(share / share[-1], draws).clamp_(max=E - 1)
            # Scrambled: popular rows lie anywhere, so even row ranges share the traffic evenly.
            own.append(((place * 2654435761 + torch.arange(T)[:, None] * 7919) % E).reshape(-1))
        ids.append(own)
    grad = [torch.randn(case.batch, T * case.dim, generator=generator) for _ in range(case.ranks)]
    first = torch.cat([own[0].view(T, per_table) for own in ids], dim=1)
    return {"ids": ids, "grad": grad, "touched": [row.unique() for row in first]}


@dataclasses.dataclass(frozen=True)
class Checked:
    """Checks of one side's step: outputs and tiles of all ranks."""

    who: str
    case: Case
    results: list[dict[str, Any]]  # `result_of`, per rank

    def compare(self, what: str, got: Tensor, want: Tensor, room: Tensor) -> None:
        """Stop the run if a number differs by more than its tolerance, or is not a number."""
        wrong = ~((got.double() - want).abs() <= room)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise SystemExit(
                f"{self.who} is wrong in {self.case}: {what} at {at}: {float(got[at])}, wanted {float(want[at])}; "
                "not timed"
            )


def check(data: dict[str, Any], sides: list[Checked]) -> None:
    """Stop the run unless all ranks' outputs and tiles are what one step of SGD makes of the tables, in float64."""
    case = sides[0].case
    T, B, L, D, W = case.tables, case.batch, case.length, case.dim, case.ranks
    # Relative errors of a sum of fp32 numbers, or of numbers rounded to bf16.
    units = {"fp32": 2.0**-20, "bf16": 2.0**-8}
    for t in range(T):
        values = table_values(t, torch.float32)
        rows, columns = data["touched"][t], torch.arange(D)
        initial = values[(rows[:, None] * D + columns) % PERIOD].double()
        total, weight = torch.zeros_like(initial), torch.zeros_like(initial)
        for rank in range(W):
            here = torch.searchsorted(rows, data["ids"][rank][0].view(T, -1)[t])
            pooled = initial[here].view(B, L, D).sum(1)
            for side in sides:
                output = side.results[rank]["output"][:, t * D : (t + 1) * D]
                room = units[side.case.wire] * (pooled.abs() + 0.5 * L)
                side.compare(f"output of rank {rank}, table {t},", output, pooled, room)
            grad = data["grad"][rank][:, t * D : (t + 1) * D].double().repeat_interleave(L, 0)
            total.index_add_(0, here, grad)
            weight.index_add_(0, here, grad.abs())
        want = initial - LR / W * total
        for side in sides:
            room = 2.0**-22 * (want.abs() + initial.abs()) + units[side.case.wire] * LR / W * weight
            covered = torch.zeros(rows.numel(), D, dtype=torch.int32)
            for rank, result in enumerate(side.results):
                for table, c0, c1, own, got in result["tiles"]:
                    if table == t:
                        here = torch.searchsorted(rows, own)
                        covered[here, c0:c1] += 1
                        what = f"touched rows, columns {c0} to {c1}, of rank {rank}, table {t},"
                        side.compare(what, got, want[here, c0:c1], room[here, c0:c1])
            copies = W if case.tiling == "data-parallel" else 1
            if not bool((covered == copies).all()):
                raise SystemExit(f"{side.who} does not hold all of table {t} in {side.case}; not timed")
    for side in sides:
        strays = sum(result["strays"] for result in side.results)
        if strays:
            raise SystemExit(f"{side.who} changed {strays} rows that no batch reads in {side.case}; not timed")


# ------------------------------------------------------------------------------------------------------------- runs


@dataclasses.dataclass(frozen=True)
class Line:
    """One printed row; milliseconds per step."""

    case: Case
    ours: float
    peer: float | None = None
    ratio: float | None = None
    sent: float | None = None
    bf16: float | None = None
    bf16_ratio: float | None = None
    bf16_sent: float | None = None
    remark: str = ""

    def cells(self) -> list[str]:
        def number(x: float | None, digits: int) -> str:
            return "" if x is None else f"{x:.{digits}f}"

        inverse = None if self.ratio is None else 1 / self.ratio
        return [
            self.case.tiling, str(self.case.dim), str(self.case.length), number(self.ours, 1), number(self.peer, 1),
            number(self.ratio, 2), number(inverse, 2), number(self.sent, 2), number(self.bf16, 1),
            number(self.bf16_ratio, 2), number(self.bf16_sent, 2), self.remark,
        ]  # fmt: skip


HEADER = [
    "tiling", "D", "L", "ours ms", "TorchRec ms", "TorchRec/ours", "ours/TorchRec", "sent MB", "bf16 ms",
    "TorchRec/bf16", "bf16 sent MB", "remark",
]  # fmt: skip


class Bench:
    def __init__(self, ours: World, peer: World | None, folder: Path, options: argparse.Namespace) -> None:
        self.ours, self.peer, self.folder, self.options = ours, peer, folder, options

    def prepare(self, world: World, name: str, case: Case) -> tuple[list[dict[str, Any]], Checked | None]:
        """Return every rank's answer and result; a rank without the case has the reason in its answer."""
        result = str(self.folder / "result")
        answers = world.ask(
            "prepare",
            name=name,
            case=dataclasses.asdict(case),
            data=str(self.folder / "data.pt"),
            result=result,
        )
        if "lacks" in answers[0]:
            return answers, None
        results = []
        for rank in range(case.ranks):
            results.append(torch.load(f"{result}.{rank}"))
            os.remove(f"{result}.{rank}")
        return answers, Checked(world.who, case, results)

    def run(self, case: Case) -> Line:
        """Check and time one case."""
        options = self.options
        data = make_data(case, options.batches)
        torch.save(data, self.folder / "data.pt")
        worlds: dict[str, World] = {}
        remarks: list[str] = []
        sides: list[Checked] = []
        sent: dict[str, float] = {}
        try:
            for name, world, wire in (("ours", self.ours, "fp32"), ("peer", self.peer, "fp32"),
                                      ("bf16", self.ours, "bf16")):  # fmt: skip
                # Replicas' gradients have no number format of their own on the wire.
                if world is None or (wire == "bf16" and (options.no_bf16 or case.tiling == "data-parallel")):
                    continue
                answers, side = self.prepare(world, name, dataclasses.replace(case, wire=wire))
                if side is None:
                    remarks.append(answers[0]["lacks"])
                    continue
                sides.append(side)
                worlds[name] = world
                if answers[0]["remark"]:
                    remarks.append(answers[0]["remark"])
                if answers[0]["sent"] is not None:
                    sent[name] = statistics.mean(answer["sent"] for answer in answers) / 1e6
            check(data, sides)
            sides.clear()
            steps = {
                name: max(1, min(200, int(options.round_seconds / (world.seconds(name, 2) + 1e-6))))
                for name, world in worlds.items()
            }
            rounds = [
                {name: world.seconds(name, steps[name]) * 1e3 for name, world in worlds.items()}
                for _ in range(options.rounds)
            ]
        finally:
            for world in {id(world): world for world in worlds.values()}.values():
                world.ask("drop")

        def middle(name: str) -> float | None:
            return statistics.median(r[name] for r in rounds) if name in worlds else None

        def ratio(name: str) -> float | None:
            return statistics.median(r["peer"] / r[name] for r in rounds) if {name, "peer"} <= set(worlds) else None

        own = middle("ours")
        assert own is not None
        return Line(case, own, middle("peer"), ratio("ours"), sent.get("ours"), middle("bf16"), ratio("bf16"),
                    sent.get("bf16"), "; ".join(remarks))  # fmt: skip

    def stages(self, case: Case) -> None:
        """Print the parts of a step's time."""
        options = self.options
        data = make_data(case, options.batches)
        torch.save(data, self.folder / "data.pt")
        _, side = self.prepare(self.ours, "ours", case)
        assert side is not None
        check(data, [side])
        steps = max(3, min(200, int(options.rounds * options.round_seconds / self.ours.seconds("ours", 2))))
        if options.profile:
            report = self.ours.ask("profile", name="ours", steps=steps, lines=options.profile)[0]
            print(f"\n{case.tiling}, D {case.dim}, L {case.length}, wire {case.wire}: rank 0 by own time, "
                  f"{report['total']:.1f} ms of processor time a step under the profiler\n")  # fmt: skip
            print("| ms/step | calls/step | where |\n|---|---|---|")
            for own, calls, where in report["profile"]:
                print(f"| {own:.2f} | {calls:.0f} | {where.replace('|', '/')} |")
        if options.stages:
            reports = self.ours.ask("stages", name="ours", steps=steps)
            copy = statistics.mean(report["copy"] for report in reports) / 1e9
            print(f"\n{case.tiling}, D {case.dim}, L {case.length}, wire {case.wire}; copy {copy:.1f} GB/s on each "
                  f"of {case.ranks} ranks\n")  # fmt: skip
            print("| stage | ms | processor ms | faults | bound ms | ms by rank |\n|---|---|---|---|---|---|")
            total = 0.0
            found = {stage for report in reports for stage in report["stages"]}
            for stage in [*ORDER, *sorted(found - set(ORDER))]:
                if stage not in found:
                    continue
                times = [report["stages"].get(stage, (0.0, 0.0, 0.0)) for report in reports]
                elapsed, busy, faults = (statistics.mean(column) for column in zip(*times, strict=True))
                bound = 1e3 * statistics.mean(report["bounds"].get(stage, 0.0) for report in reports)
                total += bound
                text = {"rest": "", "step": f"{total:.2f}"}.get(stage, f"{bound:.2f}")
                by_rank = " ".join(f"{1e3 * own:.2f}" for own, *_ in times)
                print(
                    f"| {stage} | {1e3 * elapsed:.2f} | {1e3 * busy:.2f} | {faults:.0f} | {text} | {by_rank} |",
                    flush=True,
                )
        self.ours.ask("drop")


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for tiling, dim, length in itertools.product(options.tilings, options.dims, options.lengths):
        sizes = (options.tables, options.rows, options.batch, options.ranks, options.hosts)
        yield Case(tiling, dim, length, *sizes, pooled=not options.unpooled)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=os.environ.get("TILEREC_PEER_PYTHON", ".venv-peer/bin/python"))
    parser.add_argument("--no-peer", action="store_true", help="ours alone")
    parser.add_argument("--quick", action="store_true", help="small tables and batches, few rounds: to see it work")
    parser.add_argument("--stages", action="store_true", help="where a step of ours goes, and what bounds it")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="cProfile of our rank 0")
    parser.add_argument("--tilings", type=words, default=list(TILINGS), help=f"of {TILINGS + HOST_TILINGS}")
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--lengths", type=numbers, default=[1, 10])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="that many hosts of ranks / hosts, by number only")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=2048, help="samples of a rank")
    parser.add_argument("--batches", type=int, default=4, help="different ones, in turn")
    parser.add_argument("--wire", choices=["fp32", "bf16"], default="fp32", help="of --stages and --profile")
    parser.add_argument("--no-bf16", action="store_true", help="leave out the bf16 columns")
    parser.add_argument("--unpooled", action="store_true", help="a row per id, by EmbeddingCollection")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-seconds", type=float, default=0.4)
    parser.add_argument("--csv", type=Path, help="write the rows there too")
    if "--quick" in sys.argv:  # its values are defaults too: an explicit option still counts
        parser.set_defaults(rows=10_000, batch=256, rounds=3, round_seconds=0.1)
    options = parser.parse_args()
    unknown = set(options.tilings) - set(TILINGS + HOST_TILINGS)
    if unknown:
        parser.error(f"--tilings {sorted(unknown)}: wanted some of {TILINGS + HOST_TILINGS}")
    if options.hosts < 1 or options.ranks % options.hosts:
        parser.error(f"--ranks {options.ranks} --hosts {options.hosts}: hosts must have the same number of ranks")
    return options


def main() -> None:
    options = parse()
    alone = options.no_peer or options.stages or bool(options.profile) or options.hosts > 1
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        ours = World("tilerec", sys.executable, "sharded_step.py", options.ranks, folder, ["--serve"])
        peer = None if alone else World("TorchRec", options.peer, "sharded_peer.py", options.ranks, folder, [])
        try:
            print(f"- machine: {machine()}; {options.ranks} ranks x 1 thread on {options.hosts} host"
                  f"{'s (by number only)' if options.hosts > 1 else ''}, gloo")  # fmt: skip
            print(f"- ours: torch {torch.__version__}, Python {platform.python_version()}, {status()}")
            if peer is not None:
                hello = peer.ask("hello")[0]
                print(f"- peer: torchrec {hello['torchrec']}, fbgemm-gpu-cpu {hello['fbgemm']}, torch "
                      f"{hello['torch']}, Python {hello['python']}")  # fmt: skip
            print(f"- {options.tables} tables x {options.rows} rows, {options.batch} samples a rank, Zipf 1.05 with "
                  f"scrambled ids{', a row per id' if options.unpooled else ''}, SGD; sparse part only")  # fmt: skip
            print(f"- recipe: `{' '.join(['python', *sys.argv])}`, {time.strftime('%Y-%m-%d')}; "
                  f"{options.rounds} rounds of {options.round_seconds} s in turn, medians\n")  # fmt: skip
            if not backends.NATIVE_CPU:
                print("**the native library is not loaded: these are the reference kernels' times**\n")
            bench = Bench(ours, peer, folder, options)
            if options.stages or options.profile:
                for case in cases(options):
                    bench.stages(dataclasses.replace(case, wire=options.wire))
                return
            print("| " + " | ".join(HEADER) + " |")
            print("|" + "---|" * len(HEADER), flush=True)
            lines = []
            try:
                for case in cases(options):
                    lines.append(bench.run(case))
                    print("| " + " | ".join(lines[-1].cells()) + " |", flush=True)
            finally:
                if options.csv:
                    with options.csv.open("w", newline="") as file:
                        csv.writer(file).writerows([HEADER, *[line.cells() for line in lines]])
        finally:
            ours.close()
            if peer is not None:
                peer.close()


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(Ours, lambda *_: {"torch": torch.__version__}, {"stages": measure_stages, "profile": profile})
    else:
        main()
