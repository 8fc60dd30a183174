"""Latency of an exported DLRM: the model in Python, its package in Python, its package in C++, in turns.

    python benchmarks/export_latency.py [--rows 10000] [--rounds 15] [--threads 1 2] [--row-type int8]
                                        [--samples 1 2 64 512]

26 tables of 64 columns, 13 dense features, one id per bag, layers 64-64 and 64-1. Each round measures the three one
after the other, each for several calls after one that is not counted; the numbers are medians over all calls, in
microseconds. The outputs of the package are compared with those of the model before anything is measured. Needs g++.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tilerec.export import Package, cpp_flags, export, load
from tilerec.export.arguments import flat_tensors
from tilerec.models import DLRM
from tilerec.quantized import quantize_tables

TABLES, DIM, DENSE = 26, 64, 13
KEYS = [f"f{i}" for i in range(TABLES)]


def make_model(rows: int, row_type: str) -> nn.Module:
    torch.manual_seed(1)
    tables = [EmbeddingBagConfig(rows, DIM, f"t{i}", feature_names=[KEYS[i]]) for i in range(TABLES)]
    model = DLRM(EmbeddingBagCollection(tables), DENSE, [64, DIM], [64, 1]).eval()
    return model if row_type == "fp32" else quantize_tables(model, row_type, inplace=True)


def batch(samples: int, rows: int) -> tuple[Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(samples)
    ids = torch.randint(0, rows, (TABLES * samples,), generator=generator)
    lengths = torch.ones(TABLES * samples, dtype=torch.int32)
    return torch.randn(samples, DENSE, generator=generator), KeyedJaggedTensor.from_lengths_sync(KEYS, ids, lengths)


def calls_of(samples: int) -> int:
    return 200 if samples <= 64 else 30


def timed(call: Callable[[], Any], calls: int) -> list[float]:
    call()
    out = []
    for _ in range(calls):
        before = time.perf_counter_ns()
        call()
        out.append(float(time.perf_counter_ns() - before))
    return out


class Program:
    """The C++ program of one package."""

    def __init__(self, folder: Path, package: Path) -> None:
        source, binary = Path(__file__).with_suffix(".cpp"), folder / "export_latency"
        subprocess.run(["g++", "-O2", source, "-o", binary, *cpp_flags()], check=True)
        self._folder = folder
        self._process = subprocess.Popen([binary, package], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def timed(self, tensors: list[Tensor], calls: int) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        path = self._folder / "inputs"
        with path.open("wb") as file:
            for tensor in tensors:
                file.write(struct.pack(f"<{tensor.dim()}q", *tensor.shape))
                file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        self._process.stdin.write(f"{path} {calls + 1} {torch.get_num_threads()}\n")
        self._process.stdin.flush()
        return [float(text) for text in self._process.stdout.readline().split()][1:]


def measure(model: nn.Module, package: Package, program: Program, rows: int, samples: int, rounds: int) -> None:
    args = batch(samples, rows)
    flat = flat_tensors(package.manifest.signature, args)
    with torch.no_grad():
        assert torch.equal(model(*args), package(*args)), samples
        found: dict[str, list[float]] = {"model": [], "package": [], "C++": []}
        for _ in range(rounds):
            found["model"] += timed(lambda: model(*args), calls_of(samples))
            found["package"] += timed(lambda: package(*args), calls_of(samples))
            found["C++"] += program.timed(flat, calls_of(samples))
    middle = {name: median(times) / 1e3 for name, times in found.items()}
    line = "  ".join(f"{middle[name]:9.1f}" for name in found)
    print(f"{samples:8}  {line}  {middle['model'] / middle['C++']:7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--row-type", default="fp32", help="fp32, int8, int4, ...")
    parser.add_argument("--samples", type=int, nargs="*", default=[1, 2, 64, 512])
    options = parser.parse_args()
    model = make_model(options.rows, options.row_type)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        before = time.perf_counter()
        export(model, batch(4, options.rows), path)
        weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        print(
            f"export: {time.perf_counter() - before:.1f} s, {path.stat().st_size / 1e6:.1f} MB for "
            f"{weights / 1e6:.1f} MB of weights ({path.stat().st_size / weights:.3f})"
        )
        before = time.perf_counter()
        package = load(path, verify=False)
        print(f"load: {time.perf_counter() - before:.3f} s")
        program = Program(Path(folder), path)
        for threads in options.threads:
            torch.set_num_threads(threads)
            print(f"{threads} threads, {options.row_type} rows, us per call:")
            print(" samples      model    package        C++  model/C++")
            for samples in options.samples:
                measure(model, package, program, options.rows, samples, options.rounds)


if __name__ == "__main__":
    main()
