"""Training speed alone and beside a busy process, by the way in which OpenMP's threads wait.

    python benchmarks/busy_neighbour.py                    # one process with all cores, and two ranks
    python benchmarks/busy_neighbour.py --rounds 5 --busy 2

libgomp's threads wait in a loop for a while before they sleep. On an idle machine that saves a wake-up per parallel
region. Beside another process a waiting thread takes a core from the thread it waits for.

Variants are interleaved, so other load of the machine meets all of them; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

VARIANTS: dict[str, dict[str, str]] = {
    "active": {"OMP_WAIT_POLICY": "active"},
    # The count that libgomp takes where no policy is set; it takes precedence over the policy.
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "spin 30k": {"GOMP_SPINCOUNT": "30000"},
    "spin 10k": {"GOMP_SPINCOUNT": "10000"},
    "spin 3k": {"GOMP_SPINCOUNT": "3000"},
    "spin 1k": {"GOMP_SPINCOUNT": "1000"},
    "spin 300": {"GOMP_SPINCOUNT": "300"},
    "spin 100": {"GOMP_SPINCOUNT": "100"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
BUSY = "x = 0\nwhile True:\n    x += 1\n"


def samples_per_second(variant: dict[str, str], nproc: int, steps: int) -> float:
    """Train the synthetic recipe in new processes; return the samples per second of its summary."""
    environment = {**os.environ, **variant}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        settings = [f"train.max_steps={steps}", "data.held_out_rows=1000", "train.log_every=1000"]
        command = [sys.executable, "-m", "tilerec", "train", "synthetic", "--log-dir", str(log)]
        command += [part for setting in settings for part in ("--set", setting)]
        command += ["--nproc", str(nproc)] if nproc > 1 else []
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((log / "summary.json").read_text())
    return float(found["samples_per_second"])


def main() -> None:
    """Measure every variant in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--busy", type=int, default=1, help="busy processes beside training")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names, separated by commas")
    parser.add_argument("--nproc", default="1,2", help="numbers of processes, separated by commas")
    given = parser.parse_args()
    names, ranks = given.variants.split(","), [int(n) for n in given.nproc.split(",")]
    found: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(given.rounds):
        for busy in (0, given.busy):
            beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
            try:
                for nproc in ranks:
                    for name in names:
                        speed = samples_per_second(VARIANTS[name], nproc, given.steps)
                        found.setdefault((name, nproc, busy), []).append(speed)
            finally:
                for process in beside:
                    process.kill()
                    process.wait()
    print(f"samples/s, median of {given.rounds} rounds; load average {os.getloadavg()[0]:.1f} at the end")
    for name in names:
        for nproc in ranks:
            alone, beside = (statistics.median(found[name, nproc, busy]) for busy in (0, given.busy))
            print(f"{name:14s} {nproc} processes: {alone:9,.0f} alone {beside:9,.0f} beside {given.busy} busy")


if __name__ == "__main__":
    main()
