"""Train a run file under any launcher: python, torchrun, srun or Kubernetes.

python train.py run.toml runs/a
"""

import sys
from dataclasses import replace

from rich.console import Console

from tilerec.train import read_run_file, run
from tilerec.train.config import CheckpointConfig


def main(file: str, log_dir: str) -> None:
    """Begin the run, or go on from the newest checkpoint in log_dir."""
    run(replace(read_run_file(file), log_dir=log_dir, checkpoint=CheckpointConfig(every=1000)), console=Console())


if __name__ == "__main__":
    main(*sys.argv[1:])
