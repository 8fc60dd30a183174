"""Programs written for TorchRec, under TorchRec and under tilerec: are the losses equal?

    python benchmarks/ported.py                        # all of examples/ported, on 1 and on 2 ranks
    python benchmarks/ported.py --ranks 2 --only bert4rec

Each program runs unchanged, once per library: in the environment with TorchRec (`make peer`), and in this one with
`python -m tilerec.compat.torchrec`. The script compares every line that a program prints: words must be equal, and
numbers must agree within the tolerance. It exits with 1 if they do not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {
    "golden_dlrm": ["golden_dlrm.py"],
    "golden_dlrm, data-parallel": ["golden_dlrm.py", "--data-parallel"],
    "two_tower": ["two_tower.py"],
    "bert4rec": ["bert4rec.py"],
    "criteo_trainer": ["criteo_trainer.py", "--epochs", "2"],
}
TOLERANCE = 1e-4


def run(python: str, program: list[str], ranks: int, stand_ins: bool) -> list[str]:
    """Return the lines that rank 0 prints."""
    script = str(ROOT / "examples" / "ported" / program[0])
    what = ["-m", "tilerec.compat.torchrec", script] if stand_ins else [script]
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *what, *program[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr[-4000:]}")
    return [line for line in result.stdout.splitlines() if line.startswith(("step", "val"))]


def difference(theirs: str, ours: str) -> float:
    """Return the largest relative difference of the numbers of two lines; infinite if other words differ."""
    worst = 0.0
    pairs = list(zip(theirs.split(), ours.split(), strict=True))
    for a, b in pairs:
        if a != b:
            try:
                worst = max(worst, abs(float(a) - float(b)) / max(abs(float(a)), 1e-9))
            except ValueError:
                return float("inf")
    return worst


def main() -> int:
    """Compare the programs; return 1 if one differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", default=str(ROOT / ".venv-peer" / "bin" / "python"), help="Python with TorchRec")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="run programs whose name contains this")
    args = parser.parse_args()
    failed = 0
    print(f"{'program':28} {'ranks':>5} {'lines':>5}  {'TorchRec, last':32} {'tilerec, last':32} largest difference")
    for name, program in PROGRAMS.items():
        for ranks in args.ranks if args.only in name else ():
            theirs = run(args.peer, program, ranks, stand_ins=False)
            ours = run(sys.executable, program, ranks, stand_ins=True)
            same = len(theirs) == len(ours) > 0
            worst = max(map(difference, theirs, ours)) if same else float("inf")
            failed += worst > TOLERANCE
            print(f"{name:28} {ranks:5} {len(ours):5}  {theirs[-1]:32} {ours[-1]:32} {worst:.1e}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
