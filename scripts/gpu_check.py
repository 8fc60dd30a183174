"""Run all builds, tests and benchmarks that need a GPU, and write their output into a folder.

    python scripts/gpu_check.py [--out build/gpu] [--only tests lookup ...] [--quick]

Needs a Python with PyTorch's GPU build, Triton, and the packages of the extra `test`. It needs no network and no
installation (the working tree is put on the path). Each step runs in its own process, so a failed step does not stop
the others. Steps, in order:

  machine    device, driver, versions
  native     the CPU library, if there is a compiler (the host side of tests uses it)
  tests      tests/cuda: on an H100 beside 16 cores about 5 minutes
  lookup     benchmarks/gpu_lookup.py: time, bytes and roofline per case
  moves      benchmarks/gpu_moves.py: jagged ops, exchanged and packed rows
  hash       benchmarks/hash.py --device cuda

Exits with 1 if a step failed. The summary is printed last.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """A command, its time limit in seconds, and the arguments that --quick adds."""

    name: str
    command: list[str]
    limit: int
    quick: tuple[str, ...] = ()


MACHINE = (
    "import torch, triton; print(torch.cuda.get_device_name(), torch.__version__, 'triton', triton.__version__, "
    "'CUDA', torch.version.cuda, torch.cuda.get_device_properties(0))"
)


def steps(out: Path) -> list[Step]:
    """Return all steps; they write under `out`."""
    python = sys.executable
    return [
        Step("machine", [python, "-c", MACHINE], 60),
        Step("native", ["sh", "-c", "cmake -S . -B build/native -G Ninja && cmake --build build/native"], 300),
        Step(
            "tests",
            [
                python,
                "-m",
                "pytest",
                "-q",
                "-rfE",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:benchmark",  # pytest-benchmark, if installed, warns of several workers
                "-n",
                str(min(14, os.cpu_count() or 1)),  # most of the time goes to Triton's compiler
                "--session-timeout",
                "520",
                "tests/cuda",
            ],
            540,
            ("-x",),
        ),
        Step(
            "lookup",
            [python, "benchmarks/gpu_lookup.py", "--kernels", "--json", str(out / "gpu_lookup.json")],
            540,
            ("--case", "P1-fp32", "P3-bf16", "small", "--rounds", "10"),
        ),
        Step("moves", [python, "benchmarks/gpu_moves.py"], 300),
        Step("hash", [python, "benchmarks/hash.py", "--device", "cuda", "--peer", "none"], 300),
    ]


def run(step: Step, out: Path, quick: bool) -> tuple[int, float]:
    """Run one step, print and save its output; return its exit status and seconds."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["PYTHONUNBUFFERED"] = "1"
    command = [*step.command, *(step.quick if quick else ())]
    print(f"==> {step.name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    with open(out / f"{step.name}.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        limit = threading.Timer(step.limit, process.kill)
        limit.start()
        try:
            for line in process.stdout:
                log.write(line)
                print(line, end="", flush=True)
            status = process.wait()
        finally:
            limit.cancel()
            process.kill()
    return status, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    names = [step.name for step in steps(Path())]
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = [(step.name, *run(step, given.out, given.quick)) for step in steps(given.out) if step.name in given.only]
    for name, status, seconds in results:
        print(f"{name:8} {'ok' if status == 0 else f'failed ({status})':12} {seconds:6.0f} s")
    return int(any(status for _, status, _ in results))


if __name__ == "__main__":
    sys.exit(main())
