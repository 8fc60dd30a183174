"""Lookups and fused updates on a GPU: time, bytes, and the fraction of the memory's speed.

    python benchmarks/gpu_lookup.py [--case P1-fp32 ...] [--optimizer rowwise_adagrad ...] [--json FILE]
    python benchmarks/gpu_lookup.py --device cpu --shrink 2000     # the script itself, without a GPU

Every result is compared with one of plain PyTorch in fp64 before anything is timed. A time is the median over rounds,
each on another batch. The implementations run one after the other, case by case: the tables of two may not fit.

Output
  GB/s      algorithmic: every occurrence's row counts; more than the memory's speed if rows repeat
  roofline  compulsory bytes / (time x copy bandwidth measured in this run): never above 1
  host      wall time until a forward + backward + update is enqueued on an idle device
  launches  kernels and copies of one forward + backward + update, as torch's profiler counts them

Bytes. A row is read in sectors of 32 bytes: R = 32 ceil(D s / 32). U distinct (table, row) pairs in a batch.
  forward   U R + outputs + ids + offsets                           algorithmic: N R instead of U R
  backward  2 U R + state + output gradients + ids + 4 N            algorithmic: N D s instead of the output gradients
  state     row-wise Adagrad 64 U (two sectors), Adagrad 8 U D, Adam 16 U D

Peers: `torch.nn.functional.embedding_bag` (`embedding`) with `sparse=True` and torch's optimizer step; FBGEMM if it can
be imported.

Legend: T tables, E rows, D columns, B samples, L ids per bag, N ids in all, s bytes of an element.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path[:0] = [str(Path(__file__).parent.parent)]

from tilerec.ops import backends  # noqa: F401, E402
from tilerec.storage.flat_storage import flat_memory  # noqa: E402

OPS = torch.ops.tilerec
LR, EPS = 0.01, 1e-8
HYPER = {
    "sgd": [LR, 1.0, 0.0, 0.0, 0.0, 0.0],
    "adagrad": [LR, 1.0, 0.0, 0.0, EPS, 0.0],
    "rowwise_adagrad": [LR, 1.0, 0.0, 0.0, EPS, 0.0, 0.0],
    "adam": [LR, 1.0, 0.0, 0.0, EPS, 0.9, 0.999, 0.0, 0.0],
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Ids per sample of the 26 features of Criteo's terabyte set made multi-hot, as in MLPerf's DLRM-DCNv2.
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MULTI_HOT_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
    11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape: per table rows, columns and ids per bag."""

    name: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    lengths: tuple[int, ...]
    batch: int
    dtype: str = "fp32"
    pooled: bool = True
    exponent: float = 0.0  # of the power law of the ids; 0 is uniform

    def shrunk(self, by: int) -> Case:
        """Return the same shape with fewer rows and samples."""
        rows = tuple(max(3, r // by) for r in self.rows)
        return dataclasses.replace(self, rows=rows, batch=max(2, self.batch // by))


def same(name: str, tables: int, rows: int, dim: int, batch: int, length: int, **rest: Any) -> Case:
    return Case(name, (rows,) * tables, (dim,) * tables, (length,) * tables, batch, **rest)


CASES = [
    same("P1-fp32", 32, 1_000_000, 128, 4096, 20),
    same("P1-bf16", 32, 1_000_000, 128, 4096, 20, dtype="bf16"),
    same("P1-zipf", 32, 1_000_000, 128, 4096, 20, exponent=1.05),
    same("P2-fp32", 26, 10_000_000, 128, 65536, 1, dtype="fp32"),
    same("P2-bf16", 26, 10_000_000, 128, 65536, 1, dtype="bf16"),
    same("P3-bf16", 64, 1_000_000, 32, 8192, 10, dtype="bf16"),
    Case("mixed-dims", (1_000_000,) * 24, (16, 32, 64, 128, 4, 256) * 4, (10,) * 24, 4096, exponent=1.05),
    Case("criteo-multi-hot", MULTI_HOT_ROWS, (128,) * 26, MULTI_HOT, 4096, exponent=1.05),
    same("unpooled-1M", 10, 1_000_000, 128, 104_857, 1, pooled=False, exponent=1.05),
    same("small", 4, 1000, 64, 1024, 10),
]


class Data:
    """A batch of a case, on the device."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        parts = []
        for rows, length in zip(case.rows, case.lengths, strict=True):
            u = torch.rand(case.batch * length, generator=generator, device=device, dtype=torch.float64)
            if case.exponent:
                power = 1.0 - case.exponent
                rank = ((u * ((rows + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power)).long() - 1
                # Hot rows are spread over the table.
                multiplier = next(m for m in range(7_368_787, 7_369_787) if math.gcd(m, rows) == 1)
                parts.append((rank.clamp(0, rows - 1) * multiplier) % rows)
            else:
                parts.append((u * rows).long().clamp(max=rows - 1))
        self.parts = parts
        self.ids = torch.cat(parts)
        lengths = torch.tensor(case.lengths).repeat_interleave(case.batch)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
        shape = (case.batch, sum(case.dims)) if case.pooled else (int(self.offsets[-1]), case.dims[0])
        grad = torch.randn(shape, generator=generator, device=device) / case.batch
        self.grad = grad.to(DTYPES[case.dtype])
        self.distinct = [int(part.unique().numel()) for part in parts]


def fill(table: Tensor, number: int) -> None:
    """Fill with some values, the same every time, without the memory of a second table."""
    generator = torch.Generator(table.device).manual_seed(number)
    block = torch.randn(min(table.numel(), 1 << 22), generator=generator, device=table.device).to(table.dtype)
    flat = table.detach().view(-1)
    for start in range(0, flat.numel(), block.numel()):
        part = flat[start : start + block.numel()]
        part.copy_(block[: part.numel()])


class Ours:
    """The ops of this package, called as the modules call them."""

    name = "tilerec"

    def __init__(self, case: Case, optimizer: str, device: torch.device) -> None:
        self.case, self.optimizer, T = case, optimizer, len(case.rows)
        self.tables = flat_memory(list(zip(case.rows, case.dims, strict=True)), DTYPES[case.dtype], device)
        for t, table in enumerate(self.tables):
            fill(table, t)
        shapes: dict[str, Callable[[int, int], list[tuple[int, ...]]]] = {
            "sgd": lambda e, d: [],
            "adagrad": lambda e, d: [(e, d)],
            "rowwise_adagrad": lambda e, d: [(e,)],
            "adam": lambda e, d: [(e, d), (e, d)],
        }
        self.slots = [
            torch.zeros(shape, device=device)
            for e, d in zip(case.rows, case.dims, strict=True)
            for shape in shapes[optimizer](e, d)
        ]
        self.order, self.step = list(range(T)), 0
        self.no_sinks = torch.empty(0, dtype=torch.int64)
        self.names = ",".join(f"f{t}@t{t}" for t in self.order)
        B, total = case.batch, sum(case.dims)
        places = [sum(case.dims[:t]) for t in self.order]
        sizes = [B * length for length in case.lengths]
        starts = [sum(sizes[:t]) for t in self.order]
        self.starts = torch.tensor([*starts, sum(sizes)])
        if case.pooled:
            self.record = [[t * B for t in self.order], [B] * T, places, [total] * T]
        else:
            self.record = [starts, sizes, [s * case.dims[0] for s in starts], [case.dims[0]] * T]
        self.out = torch.empty(0)

    def forward(self, data: Data) -> Tensor:
        zeros, dtype = [0] * len(self.order), DTYPES[self.case.dtype]
        if self.case.pooled:
            self.out = OPS.pooled_lookup(
                self.tables, self.no_sinks, data.ids, data.offsets, None, self.order, self.order, zeros,
                [self.case.batch], dtype, self.names,
            )[0]  # fmt: skip
        else:
            self.out = OPS.sequence_lookup(
                self.tables, self.no_sinks, data.ids, self.starts, self.order, dtype, self.names
            )[0]
        return self.out

    def backward(self, data: Data) -> None:
        self.step += 1
        T = len(self.order)
        zeros = [0] * T
        OPS.update_rows_(
            self.tables, self.slots, data.grad, data.ids, data.offsets if self.case.pooled else None, None, self.order,
            *self.record, zeros, self.optimizer, HYPER[self.optimizer], [self.step] * T, zeros + zeros, zeros, zeros,
        )  # fmt: skip


class Torch:
    """`embedding_bag` with sparse gradients and torch's optimizer."""

    name = "torch"

    def __init__(self, case: Case, optimizer: str, device: torch.device) -> None:
        self.case = case
        make = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        if optimizer not in make:
            raise LookupError(f"torch has no sparse {optimizer}")
        self.tables = [
            torch.nn.Parameter(torch.empty(e, d, dtype=DTYPES[case.dtype], device=device))
            for e, d in zip(case.rows, case.dims, strict=True)
        ]
        for t, table in enumerate(self.tables):
            fill(table, t)
        self.optimizer: torch.optim.Optimizer = make[optimizer](self.tables, lr=LR)  # type: ignore[operator]
        self.out = torch.empty(0)

    def forward(self, data: Data) -> Tensor:
        per_table = [functional.embedding_bag, functional.embedding]
        outs = []
        for table, ids, length in zip(self.tables, data.parts, self.case.lengths, strict=True):
            if self.case.pooled:
                outs.append(per_table[0](ids.view(-1, length), table, mode="sum", sparse=True))
            else:
                outs.append(per_table[1](ids, table, sparse=True))
        self.out = torch.cat(outs, dim=1 if self.case.pooled else 0)
        return self.out

    def backward(self, data: Data) -> None:
        self.out.backward(data.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Fbgemm:
    """FBGEMM's table-batched embedding, if its wheel fits this torch."""

    name = "fbgemm"

    def __init__(self, case: Case, optimizer: str, device: torch.device) -> None:
        try:
            from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        except (ImportError, OSError) as error:
            raise LookupError(f"FBGEMM cannot be imported: {error}") from error
        if case.dtype == "bf16" or device.type == "cpu":
            raise LookupError("FBGEMM trains fp32 and fp16 rows on GPUs")
        kinds = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
        kind = getattr(EmbOptimType, {**kinds, "adam": "ADAM"}[optimizer])
        places = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        precision = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}[case.dtype]
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(e, d, *places) for e, d in zip(case.rows, case.dims, strict=True)],
            optimizer=kind, learning_rate=LR, eps=EPS, weights_precision=precision, output_dtype=precision,
            pooling_mode=PoolingMode.SUM if case.pooled else PoolingMode.NONE, stochastic_rounding=False,
        )  # fmt: skip
        self.tables = self.module.split_embedding_weights()
        for t, table in enumerate(self.tables):
            fill(table, t)
        self.out = torch.empty(0)

    def forward(self, data: Data) -> Tensor:
        self.out = self.module(data.ids, data.offsets)
        return self.out

    def backward(self, data: Data) -> None:
        self.out.backward(data.grad)


IMPLEMENTATIONS = (Ours, Torch, Fbgemm)


def expected(case: Case, optimizer: str, device: torch.device, data: Data, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return table t's outputs, its touched rows and their values after one step, in fp64 from the values of `fill`."""
    table = torch.empty(case.rows[t], case.dims[t], dtype=DTYPES[case.dtype], device=device)
    fill(table, t)
    ids, length, dim = data.parts[t], case.lengths[t], case.dims[t]
    rows_ND = table[ids].double()
    begin = sum(case.batch * own for own in case.lengths[:t])
    if case.pooled:
        out = rows_ND.view(-1, length, dim).sum(1)
        place = sum(case.dims[:t])
        grad_ND = data.grad[:, place : place + dim].double().repeat_interleave(length, 0)
    else:
        out, grad_ND = rows_ND, data.grad[begin : begin + ids.numel()].double()
    rows_U, inverse = ids.unique(return_inverse=True)
    g = torch.zeros(rows_U.numel(), dim, dtype=torch.float64, device=device).index_add_(0, inverse, grad_ND)
    w = table[rows_U].double()
    if optimizer == "sgd":
        w = w - LR * g
    elif optimizer == "adagrad":
        w = w - LR * g / (g.abs() + EPS)
    elif optimizer == "rowwise_adagrad":
        w = w - LR * g / (g.square().mean(1, keepdim=True).sqrt() + EPS)
    else:  # the first step of Adam
        w = w - LR * g / (g.abs() + EPS)
    return out, rows_U, w


def check(runner: Any, case: Case, optimizer: str, device: torch.device, data: Data) -> None:
    """Compare the first and the last table's results of a first step; raise if they differ."""
    out = runner.forward(data).detach()
    runner.backward(data)
    # One rounding of the output's type, for sums as large as the sum of their terms; and one of the row's type.
    rough = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}[case.dtype]
    for t in {0, len(case.rows) - 1}:
        want, rows_U, values = expected(case, optimizer, device, data, t)
        if case.pooled:
            place = sum(case.dims[:t])
            got = out[:, place : place + case.dims[t]]
        else:
            begin = sum(case.batch * own for own in case.lengths[:t])
            got = out[begin : begin + want.shape[0]]
        scale = math.sqrt(case.lengths[t])
        torch.testing.assert_close(got.double(), want, rtol=rough, atol=rough * 4 * scale)
        if runner.name == "tilerec" or optimizer == "sgd":  # the peers' epsilons and first steps differ
            torch.testing.assert_close(runner.tables[t].detach()[rows_U].double(), values, rtol=rough, atol=rough * 2)


# Cycles of the GPU's clock that a timed call finds the device busy for: about 1.5 ms at 1.98 GHz, longer than the host
# needs to enqueue a call, so the events around the call measure device time alone.
HEAD_START_CYCLES = 3_000_000


class Clock:
    """Timer of a call on the device: events on a GPU behind a busy device, wall time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host(self, call: Callable[[], Any]) -> float:
        """Return the seconds until the call returns to an idle host, with an idle device before it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        call()
        return time.perf_counter() - before

    def __call__(self, call: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            return self.host(call)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def copy_bandwidth(device: torch.device, clock: Clock) -> float:
    """Return bytes read and written per second by a copy far larger than the caches."""
    source = torch.ones((1 << 31 if device.type == "cuda" else 1 << 28) // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / statistics.median(clock(lambda: target.copy_(source)) for _ in range(9))


def sector_row(dim: int, size: int) -> int:
    return 32 * -(-dim * size // 32)


def compulsory(case: Case, optimizer: str, data: Data) -> tuple[float, float, float, float]:
    """Return bytes: forward compulsory and algorithmic, backward compulsory and algorithmic."""
    size = DTYPES[case.dtype].itemsize
    ids, offsets = data.ids.nbytes, data.offsets.nbytes if case.pooled else 0
    outputs = data.grad.nbytes
    distinct = every = moved = gathered = state = 0
    for u, dim, length in zip(data.distinct, case.dims, case.lengths, strict=True):
        n = case.batch * length
        distinct += u * sector_row(dim, size)
        every += n * sector_row(dim, size)
        gathered += n * dim * size
        state += {"sgd": 0, "rowwise_adagrad": 64 * u, "adagrad": 8 * u * dim, "adam": 16 * u * dim}[optimizer]
    moved = 2 * distinct + state + ids + 4 * data.ids.numel()
    rest = outputs + ids + offsets
    return distinct + rest, every + rest, moved + outputs, moved + gathered


def kernels(call: Callable[[], Any], device: torch.device) -> list[tuple[str, float]]:
    """Return the kernels and copies of a call on the device, in their order, and the milliseconds of each."""
    if device.type == "cpu":
        return []
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA, activity.CPU]) as profile:
        call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.elapsed_us() / 1e3) for e in events]


def graphed(runner: Ours, data: Data, clock: Clock) -> float:
    """Return the seconds of forward + backward + update replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(runner, data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(runner, data)
    return statistics.median(clock(graph.replay) for _ in range(50))


def timed(runner: Any, batches: list[Data], rounds: int, clock: Clock) -> tuple[float, float, float]:
    """Return median seconds of forward, of backward + update, and of the host for both; two rounds are left out."""
    forward, backward, host = [], [], []
    for i in range(rounds + 2):
        data = batches[i % len(batches)]
        forward.append(clock(lambda data=data: runner.forward(data)))
        backward.append(clock(lambda data=data: runner.backward(data)))
        host.append(clock.host(lambda data=data: step(runner, data)))
    return statistics.median(forward[2:]), statistics.median(backward[2:]), statistics.median(host[2:])


def step(runner: Any, data: Data) -> None:
    """Run one forward, backward and update."""
    runner.forward(data)
    runner.backward(data)


def run(kind: Any, case: Case, optimizer: str, batches: list[Data], rounds: int, bandwidth: float) -> dict[str, Any]:
    """Check and time one implementation."""
    device = batches[0].ids.device
    clock, line = Clock(device), {"case": case.name, "optimizer": optimizer, "who": kind.name}
    try:
        runner = kind(case, optimizer, device)
    except (LookupError, torch.OutOfMemoryError) as error:
        return line | {"lacks": str(error).splitlines()[0]}
    check(runner, case, optimizer, device, batches[0])
    forward, backward, host = timed(runner, batches, rounds, clock)
    launched = kernels(lambda: step(runner, batches[0]), device)
    forward_c, forward_a, backward_c, backward_a = compulsory(case, optimizer, batches[0])
    line |= {
        "forward_ms": forward * 1e3,
        "backward_ms": backward * 1e3,
        "forward_gbs": forward_a / forward / 1e9,
        "backward_gbs": backward_a / backward / 1e9,
        "forward_roofline": forward_c / forward / bandwidth,
        "backward_roofline": backward_c / backward / bandwidth,
        "host_ms": host * 1e3,
        "launches": len(launched),
        "kernels": launched,
    }
    if device.type == "cuda" and kind is Ours and case.name == "small":
        line["graph_ms"] = graphed(runner, batches[0], clock) * 1e3
    return line


def run_case(
    case: Case, optimizer: str, device: torch.device, rounds: int, bandwidth: float, who: list[str]
) -> list[dict[str, Any]]:
    """Run every implementation, one after the other: the tables of two may not fit."""
    batches = [Data(case, device, seed) for seed in range(4)]
    lines = []
    for kind in (k for k in IMPLEMENTATIONS if k.name in who):
        lines.append(run(kind, case, optimizer, batches, rounds, bandwidth))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return lines


def show(line: dict[str, Any]) -> str:
    head = f"{line['case']:18} {line['optimizer']:16} {line['who']:8}"
    if "lacks" in line:
        return f"{head} {line['lacks'][:80]}"
    text = (
        f"{head} fwd {line['forward_ms']:8.3f} ms {line['forward_gbs']:6.0f} GB/s {line['forward_roofline']:5.2f} | "
        f"bwd+update {line['backward_ms']:8.3f} ms {line['backward_gbs']:6.0f} GB/s {line['backward_roofline']:5.2f} | "
        f"host {line['host_ms']:.3f} ms, {line['launches']} launches"
    )
    return text + (f" | as a graph {line['graph_ms']:.3f} ms" if "graph_ms" in line else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--optimizer", nargs="*", default=["sgd", "rowwise_adagrad", "adam"], choices=list(HYPER))
    parser.add_argument("--who", nargs="*", default=[kind.name for kind in IMPLEMENTATIONS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide rows and samples by this")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel of a step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = set(options.case) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no case {sorted(unknown)}; there are {[case.name for case in CASES]}")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --shrink 2000 runs the script on the CPU")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    bandwidth = copy_bandwidth(device, Clock(device))
    print(f"{name}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s")
    results = []
    for case in CASES:
        if case.name not in options.case:
            continue
        case = case.shrunk(options.shrink) if options.shrink > 1 else case
        for optimizer in options.optimizer:
            for line in run_case(case, optimizer, device, options.rounds, bandwidth, options.who):
                print(show(line), flush=True)
                if options.kernels and line["who"] == Ours.name:
                    for name, ms in line.get("kernels", []):
                        print(f"    {ms * 1e3:8.1f} us  {name[:110]}")
                results.append(line)
    if options.json:
        options.json.write_text(json.dumps({"device": name, "copy_gbs": bandwidth / 1e9, "lines": results}, indent=1))


if __name__ == "__main__":
    main()
