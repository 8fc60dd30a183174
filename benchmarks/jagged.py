"""Host time of keyed jagged tensors: tilerec beside TorchRec, in one interleaved run.

    TILEREC_PEER_PYTHON=path/to/python python benchmarks/jagged.py [--keys 1000] [--batch 64] [--rounds 15]
    python benchmarks/jagged.py --ops          # the ops below it: native kernels beside the plain-PyTorch reference

The claim: at 1,000 features x 64 samples, `to_dict`, `split` into 100 and `permute` take at most half of
TorchRec's time.

Two worker processes, one per library, build the same seeded batch and take turns in rounds of each case, so a change in
the machine's load affects both. Before any time is printed the workers' results are compared. A case is timed on a
fresh tensor each time (both libraries remember `to_dict`). "synced" tensors have their key offsets, "fresh" ones are
built and synced inside of the timed span. Without a peer interpreter only tilerec's times are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

CASES = {
    "to_dict": "synced",
    "split": "synced",
    "permute": "synced",
    "permute_half": "synced",
    "getitem": "synced",
    "construct": "fresh",
    "to_dict_fresh": "fresh",
    "split_fresh": "fresh",
    "permute_fresh": "fresh",
}
CLAIMED = ("to_dict", "split", "permute")


Case = tuple[Callable[[], Any], Callable[[Any], Any]]


def cases(kjt_type: Any, keys: int, batch: int, weighted: bool) -> dict[str, Case]:
    """Return for each case the untimed preparation and the timed call."""
    import torch

    generator = torch.Generator().manual_seed(0)
    names = [f"feature_{i}" for i in range(keys)]
    lengths = torch.randint(0, 5, (keys * batch,), generator=generator)
    total = int(lengths.sum())
    values = torch.randint(0, 10**6, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) if weighted else None
    order = torch.randperm(keys, generator=generator).tolist()
    parts = min(100, keys)
    segments = [keys // parts + (i < keys % parts) for i in range(parts)]

    def synced() -> Any:
        return kjt_type.from_lengths_sync(names, values, lengths, weights)

    def nothing() -> None:
        return None

    return {
        "to_dict": (synced, lambda kjt: kjt.to_dict()),
        "split": (synced, lambda kjt: kjt.split(segments)),
        "permute": (synced, lambda kjt: kjt.permute(order)),
        "permute_half": (synced, lambda kjt: kjt.permute(order[: keys // 2])),
        "getitem": (synced, lambda kjt: kjt[names[keys // 2]]),
        "construct": (nothing, lambda _: synced()),
        "to_dict_fresh": (nothing, lambda _: synced().to_dict()),
        "split_fresh": (nothing, lambda _: synced().split(segments)),
        "permute_fresh": (nothing, lambda _: synced().permute(order)),
    }


def op_arguments(bags: int, mean_length: int) -> dict[str, tuple[Any, ...]]:
    """Make one batch for every op: `bags` bags of 0 to `2 * mean_length` ids."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 2 * mean_length + 1, (bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    ids = torch.randint(0, 10**6, (total,), generator=generator)
    weights = torch.rand(total, generator=generator)
    order = torch.randperm(bags, generator=generator)
    out_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[order].cumsum(0)])
    cuts = torch.linspace(0, 10**6, 9).long()
    return {
        "offsets_from_lengths": (lengths,),
        "segment_ids": (offsets, total),
        "select_segments": (ids, offsets, order, out_offsets, total),
        "select_segments_backward": (weights, offsets, order, out_offsets, total),
        "bucketize_by_cuts": (ids, lengths, cuts),
        "jagged_to_padded": (ids, offsets, 2 * mean_length, 0.0),
        "padded_to_jagged": (torch.rand(bags, 2 * mean_length, generator=generator), offsets, total),
        "segment_sum": (weights, offsets),
        "repeat_segments": (torch.rand(bags, generator=generator), offsets, total),
    }


def bench_ops(bags: int, mean_length: int, rounds: int) -> int:
    """Time native kernels and the reference, interleaved, on one and on two threads; results are compared first."""
    import torch

    from tilerec.ops.jagged.cpu import kernels
    from tilerec.ops.runtime.cpu.library import library, status
    from tilerec.ops.runtime.library import LIBRARY

    loaded = library()
    if loaded is None:
        raise SystemExit(str(status()))
    native = LIBRARY.taking_arguments(kernels(loaded))
    arguments = op_arguments(bags, mean_length)
    print(f"{bags} bags of 0 to {2 * mean_length} ids; torch {torch.__version__}; {status()}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name, args in arguments.items():
        pairs = [
            result if isinstance(result, tuple) else (result,)
            for result in (native[name](*args), LIBRARY.references[name](*args))
        ]
        if not all(torch.equal(one, other) for one, other in zip(*pairs, strict=True)):
            raise SystemExit(f"{name}: the results differ; no times are printed.")
    print("results: equal in all cases")
    for name, args in arguments.items():
        line = f"{name:24s}"
        for threads in (1, 2):
            torch.set_num_threads(threads)
            times: dict[str, list[float]] = {"native": [], "reference": []}
            for _ in range(rounds):
                for which, table in (("native", native), ("reference", LIBRARY.references)):
                    start = time.perf_counter()
                    table[name](*args)
                    times[which].append((time.perf_counter() - start) * 1e6)
            ours, plain = (statistics.median(times[which]) for which in ("native", "reference"))
            line += f"  {threads} thread{'s' * (threads > 1):1s} native {ours:8.1f} us"
            line += f"  reference {plain:8.1f} us  ratio {ours / plain:5.2f}"
        print(line)
    return 0


def digest(result: Any) -> str:
    """Return a fingerprint of all data of a result."""
    state = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key, item in part.items():
                state.update(key.encode())
                add(item)
        elif isinstance(part, list):
            for item in part:
                add(item)
        else:
            if hasattr(part, "keys"):
                state.update("|".join(part.keys()).encode())
                state.update(str(part.stride()).encode())
            state.update(part.values().numpy().tobytes())
            state.update(part.lengths().long().numpy().tobytes())
            state.update(part.offsets().long().numpy().tobytes())
            if part.weights_or_none() is not None:
                state.update(part.weights().numpy().tobytes())

    add(result)
    return state.hexdigest()


def work(library: str, keys: int, batch: int, weighted: bool, repeats: int) -> None:
    """Answer requests from the parent: one case's name a line, one JSON line back."""
    import torch

    torch.set_num_threads(1)
    if library == "tilerec":
        from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
    else:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    prepared = cases(KeyedJaggedTensor, keys, batch, weighted)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        prepare, run = prepared[line.strip()]
        seconds = []
        for _ in range(repeats):
            argument = prepare()
            start = time.perf_counter()
            result = run(argument)
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"seconds": statistics.median(seconds), "digest": digest(result)}), flush=True)


class Worker:
    """One library in its own process."""

    def __init__(self, python: str, library: str, arguments: Iterable[str]) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        if library == "tilerec":
            # The checkout of this file, after the caller's paths.
            root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))
        else:
            environment.pop("PYTHONPATH", None)
        command = [python, "-W", "ignore", os.path.abspath(__file__), "--worker", library, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.about = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.process.args!r} ended with code {self.process.wait()}; run it by hand to see why.")

    def ask(self, case: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--weighted", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls in one round")
    parser.add_argument("--peer-python", default=os.environ.get("TILEREC_PEER_PYTHON"))
    parser.add_argument("--ops", action="store_true", help="time the ops instead, native beside reference")
    parser.add_argument("--bags", type=int, default=64_000)
    parser.add_argument("--mean-length", type=int, default=10)
    parser.add_argument("--worker", choices=["tilerec", "torchrec"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.keys, options.batch, options.weighted, options.repeats)
        return 0
    if options.ops:
        sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        return bench_ops(options.bags, options.mean_length, options.rounds)
    arguments = [
        "--keys",
        str(options.keys),
        "--batch",
        str(options.batch),
        "--repeats",
        str(options.repeats),
    ]
    arguments += ["--weighted"] if options.weighted else []
    workers = {"tilerec": Worker(sys.executable, "tilerec", arguments)}
    if options.peer_python:
        workers["torchrec"] = Worker(options.peer_python, "torchrec", arguments)
    print(f"{options.keys} keys x {options.batch}, {'weighted' if options.weighted else 'unweighted'}, one thread")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name, worker in workers.items():
        print(f"{name}: torch {worker.about['torch']}")
    for case in CASES:
        digests = {worker.ask(case)["digest"] for worker in workers.values()}
        if len(digests) != 1:
            raise SystemExit(f"{case}: the results differ; no times are printed.")
    if "torchrec" in workers:
        print("results: equal in all cases")
    missed = []
    for case, kind in CASES.items():
        times: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(options.rounds):
            for name, worker in workers.items():
                times[name].append(worker.ask(case)["seconds"] * 1e6)
        medians = {name: statistics.median(series) for name, series in times.items()}
        line = f"{case:14s} {kind:7s}" + "".join(f"  {name} {median:9.1f} us" for name, median in medians.items())
        if "torchrec" in medians:
            ratio = medians["tilerec"] / medians["torchrec"]
            line += f"  ratio {ratio:5.2f}"
            if case in CLAIMED and ratio > 0.5:
                missed.append(case)
        print(line)
    for worker in workers.values():
        worker.close()
    if missed:
        print(f"the claim (half of TorchRec's time) is missed by: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
