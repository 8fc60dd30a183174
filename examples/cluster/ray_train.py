"""Train under Ray Train: storage decides where a restarted run goes on.

python ray_train.py run.toml /shared/runs/a
"""

import sys
from collections.abc import Callable
from dataclasses import replace

from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import tilerec.train
from tilerec.train.config import CheckpointConfig


def own_run(settings: dict[str, str]) -> tilerec.train.RunConfig:
    """Return the run of a run file, with checkpoints."""
    config = tilerec.train.read_run_file(settings["file"])
    return replace(config, log_dir=settings["log_dir"], checkpoint=CheckpointConfig(every=1000))


def fit(
    make_run: Callable[[dict[str, str]], tilerec.train.RunConfig], settings: dict[str, str], workers: int, storage: str
) -> Result:
    """Train on so many workers; Ray starts them again after a failure."""

    def loop(settings: dict[str, str]) -> None:
        tilerec.train.run(make_run(settings))

    trainer = TorchTrainer(
        loop,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=100)),
    )
    return trainer.fit()


if __name__ == "__main__":
    file, log_dir = sys.argv[1:]
    fit(own_run, {"file": file, "log_dir": log_dir}, workers=2, storage=f"{log_dir}-ray")
