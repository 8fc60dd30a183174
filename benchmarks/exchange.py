"""The exchange of ids and rows on one rank: native kernels, the plain-PyTorch reference, and a plain copy.

    python benchmarks/exchange.py [--slots 26] [--batch 2048] [--rounds 15] [--threads 1,2]

The claims: routing ids to the ranks that hold their rows takes a few times the copy of its results, at any number of
parts. Writing rows into an output (or reading them out of a gradient) costs little more than copying them.

Every case runs by turns natively, by the reference and as a copy of as many bytes as the case reads and writes (half
of each), so a change in the machine's load affects all three. Medians are printed, after the results were compared. The
bytes of `route_ids` are those of ids and offsets read and of all five results written. Those of rows are rows read and
written once (a sum: rows read, output read and written). "fixed" is the same call on one bag: the cost of a call.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.ops import backends as backends
from tilerec.ops.exchange import definition as exchange
from tilerec.ops.runtime.cpu.library import library, status

ROWS = 100_000


class Case(NamedTuple):
    """One call of an op."""

    name: str
    op: str
    arguments: tuple[Any, ...]
    bytes: int  # read and written


REFERENCE: dict[str, Callable[..., Any]] = {
    "route_ids": exchange._route_ids_reference,
    "place_rows_": exchange._place_rows_reference_,
    "pick_rows": exchange._pick_rows_reference,
}


def route_case(slots: int, batch: int, length: int, parts: int, ids: torch.dtype) -> Case:
    """Make ids of `slots` features, `length` per bag, every table cut evenly into `parts`; a part per rank."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, ROWS, (slots * batch * length,), generator=generator).to(ids)
    offsets = torch.arange(slots * batch + 1) * length
    cuts = [ROWS * p // parts for p in range(parts + 1)] * slots
    wire = [p * slots + s for s in range(slots) for p in range(parts)]
    names = ",".join(f"f{s}@t{s}" for s in range(slots))
    arguments = (
        values, offsets, list(range(slots)), [batch], cuts, [parts] * slots, wire, False, torch.int32, names,
    )  # fmt: skip
    results = REFERENCE["route_ids"](*arguments)
    read = values.nbytes + offsets.nbytes
    label = f"route_ids L {length:2d} parts {parts:2d} {'int32' if ids == torch.int32 else 'int64'}"
    return Case(label, "route_ids", arguments, read + sum(t.nbytes for t in results))


def rows_case(op: str, slots: int, batch: int, dim: int, parts: int) -> Case:
    """Make rows of `slots` features side by side in `[batch, slots * dim]`: all bags of one part, or parts summed."""
    generator = torch.Generator().manual_seed(0)
    lists: list[list[int]] = [[], [], [], [], [], []]
    numbers: list[Tensor] = []
    for s in range(slots):
        for _ in range(parts):
            own = torch.arange(batch)[torch.rand(batch, generator=generator) < 1 / parts].int()
            start = -1 if parts == 1 else sum(map(len, numbers))
            entry = (len(own), dim, start, s * dim, slots * dim, int(parts > 1))
            for values, number in zip(lists, entry, strict=True):
                values.append(number)
            if parts > 1:
                numbers.append(own)
    joined = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.int32)
    count = sum(lists[0]) * dim
    flat = torch.zeros(batch * slots * dim)
    size = 4 * count * (3 if op == "place_rows_" and parts > 1 else 2)
    label = f"{op} D {dim:3d} parts {parts}"
    if op == "pick_rows":
        return Case(label, op, (flat, joined, *lists[:-1]), size)
    return Case(label, op, (flat, torch.rand(count, generator=generator), joined, *lists), size)


def same(case: Case) -> bool:
    """Return True if the op gives the reference's result."""
    if case.op == "place_rows_":
        flat, *rest = case.arguments
        pair = (flat.clone(), flat.clone())
        getattr(torch.ops.tilerec, case.op)(pair[0], *rest)
        REFERENCE[case.op](pair[1], *rest)
        return torch.equal(*pair)
    results = [
        getattr(torch.ops.tilerec, case.op)(*case.arguments),
        REFERENCE[case.op](*case.arguments),
    ]
    tuples = [result if isinstance(result, tuple) else (result,) for result in results]
    return all(torch.equal(one, other) for one, other in zip(*tuples, strict=True))


def micros(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Return median microseconds: native through the dispatcher, the reference, a copy."""
    op = getattr(torch.ops.tilerec, case.op).default
    source, target = torch.ones(case.bytes // 8), torch.ones(case.bytes // 8)
    runs: dict[str, Callable[[], Any]] = {
        "native": lambda: op(*case.arguments),
        "reference": lambda: REFERENCE[case.op](*case.arguments),
        "copy": lambda: target.copy_(source),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(micros(run))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def cases(slots: int, batch: int) -> list[Case]:
    found = [
        route_case(slots, batch, length, parts, ids)
        for length in (1, 10)
        for parts in (1, 2, 8, 64)
        for ids in ((torch.int64, torch.int32) if parts == 1 else (torch.int64,))
    ]
    for op in ("place_rows_", "pick_rows"):
        found += [rows_case(op, slots, batch, dim, parts) for dim in (64, 128) for parts in (1, 2)]
    return found


def fixed_cases(slots: int) -> list[Case]:
    """Make the same calls on one bag: the cost of a call."""
    one = [route_case(slots, 1, 1, parts, torch.int64) for parts in (1, 2, 8, 64)]
    moves = [rows_case(op, slots, 1, 1, parts) for op in ("place_rows_", "pick_rows") for parts in (1, 2)]
    return [case._replace(name=f"fixed: {case.name}") for case in one + moves]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=26)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", default="1,2")
    options = parser.parse_args(arguments)
    if library() is None:
        raise SystemExit(str(status()))
    print(f"{options.slots} slots, batch {options.batch}; torch {torch.__version__}; {status()}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    every = cases(options.slots, options.batch)
    fixed = fixed_cases(options.slots)
    for case in every + fixed:
        if not same(case):
            raise SystemExit(f"{case.name}: the results differ; no times are printed.")
    print("results: equal in all cases")
    for threads in [int(number) for number in options.threads.split(",")]:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' * (threads > 1)}")
        for case in every:
            us = measure(case, options.rounds)
            speeds = {name: case.bytes / value / 1e3 for name, value in us.items()}
            print(
                f"  {case.name:34s} native {us['native']:9.1f} us {speeds['native']:6.1f} GB/s   copy "
                f"{us['copy']:8.1f} us {speeds['copy']:6.1f} GB/s   reference {us['reference']:9.1f} us   "
                f"native/copy {us['native'] / us['copy']:5.2f}  reference/native {us['reference'] / us['native']:5.1f}"
            )
    torch.set_num_threads(1)
    print()
    for case in fixed:
        us = measure(case, 20 * options.rounds)
        print(f"  {case.name:42s} native {us['native']:7.1f} us   reference {us['reference']:9.1f} us")


if __name__ == "__main__":
    main()
