"""Host time of a call on a GPU, measured without a GPU: Python, torch's dispatcher, Triton's launch path.

    python benchmarks/gpu_host.py [--tables 26] [--batch 4096] [--length 1] [--dim 16] [--rounds 9] [--json FILE]
    python benchmarks/gpu_host.py --tables 4 --batch 1024 --length 10 --dim 64       # the floor of a small step

The host functions of the Triton backend serve tensors of the CPU here, so checks, keys of layouts, packing and launches
run as they would on a GPU. The differences:
  - nothing is compiled and no kernel runs: a launch ends where Triton would call its launcher in C (3 to 5 us on a GPU)
  - instead of a copy of a report to pinned memory and a recorded event, there is a copy on the CPU and an object that
    does nothing (a GPU takes about 5 us more)
  - torch's own ops (`empty`, `sort` …) are the CPU's: they are left out of `host`, as `torch`, since on a GPU their
    share is a launch each. A step has no dense part: the loss is the sum of the output
The numbers are therefore a lower bound of a GPU's host time, and of tilerec's shares of it.

Columns, in microseconds per call, medians of the rounds: `host` without `torch`; then its shares, each without the time
of the others that it calls (their sum exceeds `host` by the cost of the measurement).
  launch    Triton's launch path, or `launch.py` in front of it; `n` launches
  reports   requesting a report, sending it, checking those that have arrived
  layout    the key of a layout and its lookup
  checks    of shapes, types and places
  op        the rest of the op's host function
  backward  collecting gradients and passing them to the optimizer (`definition.py`, `table_rows.py`)
  rest      the dispatcher, autograd, the module
  torch     ops of torch, run on the CPU
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path[:0] = [str(Path(__file__).parent.parent)]

from tilerec.modules.embedding import EmbeddingCollection  # noqa: E402
from tilerec.modules.embedding_bag import EmbeddingBagCollection  # noqa: E402
from tilerec.ops.runtime import readback as later  # noqa: E402
from tilerec.ops.runtime.triton import reports  # noqa: E402
from tilerec.optim import apply_optimizer_in_backward  # noqa: E402
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor  # noqa: E402
from tilerec.spec.optimizer import RowWiseAdagrad  # noqa: E402
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig  # noqa: E402

OPS = "tilerec.ops"
SHARES = ("launch", "reports", "layout", "checks", "op", "backward", "rest", "torch")


class Clock:
    """Time by share, each without the time of the shares it calls."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.open: list[str] = ["rest"]
        self.since = 0.0
        self.runs = False

    def _note(self) -> None:
        now = time.perf_counter()
        self.spent[self.open[-1]] += now - self.since
        self.since = time.perf_counter()

    def watch(self, share: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.runs:
                return function(*args, **kwargs)
            self._note()
            self.open.append(share)
            self.calls[share] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._note()
                self.open.pop()

        return watched

    def start(self) -> None:
        self.spent.clear()
        self.calls.clear()
        self.since = time.perf_counter()


class Driver:
    """Stand-in for Triton's driver of a GPU: one H200 with its stream."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled(CompiledKernel):
    """Stand-in for a kernel that Triton compiled: a launch only counts."""

    launches = 0

    def __init__(self) -> None:
        self.module, self.function, self.packed_metadata = None, 0, (1, 1, 0)
        self.name, self.src, self._run = "", None, self._count

    def _count(self, *args: Any) -> None:
        Compiled.launches += 1

    def _init_handles(self) -> None:
        pass


def compile_nothing(self: Any, key: str, signature: Any, device: int, *rest: Any) -> Compiled:
    assert self.cache_key  # Triton finds the constants that a launch compares when it makes the launch
    kernel = self.device_caches[device][0][key] = Compiled()
    return kernel


class Event:
    """Stand-in for a CUDA event: the work before it has always completed."""

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    cuda_stream = 0


WATCHED = {
    "launch": ("runtime.triton.launch:launch",),
    "reports": (
        "runtime.triton.reports:new_report",
        "runtime.triton.reports:post",
        "runtime.triton.reports:raise_due",
    ),
    "layout": (
        "lookup.triton.layout:layout_of",
        "lookup.triton.backend:_sequence_layout",
        "lookup.triton.backend:_batch_of",
        "update.triton.tables:tables_of",
        "update.triton.record:read_record",
        "exchange.triton.rows:_plan",
        "exchange.triton.rows:_kept_plan",
        "exchange.triton.route:_layout",
    ),
    "checks": (
        "lookup.triton.backend:check_batch",
        "lookup.triton.backend:_shape_of",
        "lookup.triton.layout:check_tables",
        "lookup.triton.backend:check_starts",
        "update.triton.backend:check_tables",
        "update.triton.backend:_layout_of",
        "lookup.triton.backend:_serves",
    ),
    "op": (
        "lookup.triton.backend:pooled_lookup",
        "lookup.triton.backend:sequence_lookup",
        "lookup.triton.backend:sample_weight_grad",
        "update.triton.backend:update_rows_",
        "exchange.triton.rows:place_rows_",
        "exchange.triton.rows:pick_rows",
    ),
}
TORCH = ("empty", "zeros", "sort", "empty_like", "zeros_like", "searchsorted", "cat")


def replace_everywhere(old: Any, new: Any) -> None:
    """Replace a function in every module of the library that has it, under any name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tilerec") and module is not None:
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


def install(clock: Clock) -> None:
    """Make the Triton backend serve the CPU, without a GPU and without kernels."""
    driver.set_active(Driver())  # type: ignore[arg-type]
    JITFunction._do_compile = compile_nothing  # type: ignore[method-assign]
    for module in (reports, later):
        module.runs_synchronously = lambda device: False  # type: ignore[attr-defined]
    later._new_copy = lambda size: later._Copy(torch.zeros(size, dtype=torch.int64), Event())  # type: ignore[arg-type]
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    stream = Stream()
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment, return-value]
    torch.cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]

    backends = [
        importlib.import_module(f"{OPS}.{name}.triton.backend") for name in ("lookup", "update", "exchange", "jagged")
    ]
    watched: list[Any] = []
    for share, places in WATCHED.items():
        for place in places:
            name, _, function = place.partition(":")
            found = vars(importlib.import_module(f"{OPS}.{name}")).get(function)
            if found is not None and found not in watched:
                watched.append(clock.watch(share, found))
                replace_everywhere(found, watched[-1])
    JITFunction.run = clock.watch("launch", JITFunction.run)  # type: ignore[method-assign]
    for name in TORCH:
        setattr(torch, name, clock.watch("torch", getattr(torch, name)))
    from tilerec.ops import gpu_backends
    from tilerec.ops.gradient import definition as gradient
    from tilerec.storage.table_rows import TableRows, _SkippedRowsReport

    # A kernel begins the report of an update, so there is no report here.
    _SkippedRowsReport.__call__ = lambda self, numbers: None  # type: ignore[method-assign]
    TableRows.take = clock.watch("backward", TableRows.take)  # type: ignore[method-assign]
    for function in (gradient.deliver, gradient.submit_pooled, gradient.submit_sequence):
        replace_everywhere(function, clock.watch("backward", function))
    for name in ("submit_pooled_", "submit_sequence_"):
        gradient.LIBRARY.impl(name, getattr(gradient, name[:-1]), "CPU", allow_override=True)
    # The modules' functions are watched by now, those in `KERNELS` are not.
    gpu_backends.register("CPU", [{name: vars(b)[name] for name in b.KERNELS} for b in backends])


def measured(clock: Clock, call: Callable[[], Any], rounds: int, times: int = 100) -> dict[str, float]:
    """Return microseconds by share, and launches, of a call."""
    for _ in range(20):
        call()
    lines = []
    for _ in range(rounds):
        Compiled.launches = 0
        began = time.perf_counter()
        for _ in range(times):
            call()
        all_of_it = time.perf_counter() - began
        launches = Compiled.launches
        clock.runs = True
        clock.start()
        for _ in range(times):
            call()
        clock._note()
        clock.runs = False
        line = {share: clock.spent[share] / times * 1e6 for share in SHARES}
        line["n"] = launches / times
        line["host"] = all_of_it / times * 1e6 - line["torch"]
        lines.append(line)
    return {name: statistics.median(line[name] for line in lines) for name in lines[0]}


def features(tables: int, batch: int, length: int) -> KeyedJaggedTensor:
    keys = [f"f{t}" for t in range(tables)]
    lengths = torch.full((tables * batch,), length)
    jagged = KeyedJaggedTensor(keys, torch.randint(0, 100, (tables * batch * length,)), lengths=lengths)
    jagged.offsets(), jagged.length_per_key()  # values that a batch keeps after their first use
    return jagged


def calls(arguments: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    count, batch, length, dim = arguments.tables, arguments.batch, arguments.length, arguments.dim
    jagged = features(count, batch, length)
    bags = [EmbeddingBagConfig(100, dim, f"t{t}", feature_names=[f"f{t}"]) for t in range(count)]
    rows = [EmbeddingConfig(100, dim, f"t{t}", feature_names=[f"f{t}"]) for t in range(count)]
    pooled, sequence = EmbeddingBagCollection(bags), EmbeddingCollection(rows)
    for module in (pooled, sequence):
        apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    weights = [p.detach() for p in pooled.parameters()]
    sinks = torch.zeros(0, dtype=torch.int64)
    features_ = list(range(count))
    names = ",".join(f"f{t}@t{t}" for t in features_)
    ids, offsets = jagged.values(), jagged.offsets()
    starts = torch.arange(count + 1) * batch * length
    ops, per_id = torch.ops.tilerec, torch.ones(ids.shape[0])
    grad = torch.ones(batch, count * dim)
    plain = ([0] * count, [batch])
    flat = torch.empty(batch * count * dim)
    widths, strides = [dim] * count, [count * dim] * count
    moves = [batch] * count, widths, [-1] * count, [t * dim for t in features_], strides
    no_slots = torch.empty(0, dtype=torch.int32)
    moved = torch.empty(batch * count * dim)

    def step(module: Any) -> None:
        out = module(jagged)
        values = out.values() if module is pooled else torch.cat([jt.values() for jt in out.values()])
        values.backward(gradient_like(values))

    kept: dict[torch.Size, Tensor] = {}

    def gradient_like(values: Tensor) -> Tensor:
        if values.shape not in kept:
            kept[values.shape] = torch.ones(values.shape)
        return kept[values.shape]

    def inferred(module: Any) -> None:
        with torch.no_grad():
            module(jagged)

    return {
        "pooled_lookup": lambda: ops.pooled_lookup(
            weights, sinks, ids, offsets, None, features_, features_, *plain, torch.float32, names
        ),
        "pooled_lookup, weighted": lambda: ops.pooled_lookup(
            weights, sinks, ids, offsets, per_id, features_, features_, *plain, torch.float32, names
        ),
        "sequence_lookup": lambda: ops.sequence_lookup(weights, sinks, ids, starts, features_, torch.float32, names),
        "sample_weight_grad": lambda: ops.sample_weight_grad(weights, ids, offsets, grad, features_, features_, *plain),
        "place_rows_": lambda: ops.place_rows_(flat, moved, no_slots, *moves, [0] * count),
        "pick_rows": lambda: ops.pick_rows(flat, no_slots, *moves),
        "EmbeddingBagCollection, no grad": lambda: inferred(pooled),
        "EmbeddingBagCollection, forward": lambda: pooled(jagged),
        "EmbeddingBagCollection, step": lambda: step(pooled),
        "EmbeddingCollection, forward": lambda: sequence(jagged),
        "EmbeddingCollection, step": lambda: step(sequence),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--length", type=int, default=1)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    parser.add_argument("--json", type=Path, help="append a line per call")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    install(clock)
    print(f"Triton {triton.__version__}, torch {torch.__version__}; {vars(arguments)}")
    print(f"{'us per call':34}{'host':>8}{'n':>4}" + "".join(f"{share:>9}" for share in SHARES))
    for name, call in calls(arguments).items():
        if arguments.only not in name:
            continue
        line = measured(clock, call, arguments.rounds)
        print(f"{name:34}{line['host']:8.1f}{line['n']:4.0f}" + "".join(f"{line[s]:9.1f}" for s in SHARES))
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({"call": name, **line}) + "\n")


if __name__ == "__main__":
    main()
