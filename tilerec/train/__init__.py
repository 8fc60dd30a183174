"""Runs: the training loop, its config, the ranks, and the final scores."""

from tilerec.train.config import ClickConfig, DataConfig, ModelConfig, RunConfig, TaskConfig, TrainConfig
from tilerec.train.evaluate import Scores, evaluate, predict
from tilerec.train.job import run
from tilerec.train.loop import train
from tilerec.train.loss import click_loss
from tilerec.train.optimizers import Optimizers
from tilerec.train.override import override, override_all, settings
from tilerec.train.report import report
from tilerec.train.result import RunResult
from tilerec.train.run_file import read_run_file, write_run_file
from tilerec.train.run_logger import Event, JsonLines, TensorBoard, Terminal, Watcher
from tilerec.train.scores import HeldOutScores
from tilerec.train.task import Evaluation, Task
from tilerec.train.tracking import MlflowWatcher, WandbWatcher

__all__ = [
    "run",
    "train",
    "report",
    "RunConfig",
    "read_run_file",
    "write_run_file",
    "DataConfig",
    "ModelConfig",
    "TaskConfig",
    "ClickConfig",
    "Task",
    "Evaluation",
    "HeldOutScores",
    "TrainConfig",
    "RunResult",
    "Scores",
    "evaluate",
    "predict",
    "click_loss",
    "Optimizers",
    "override",
    "override_all",
    "settings",
    "Event",
    "Watcher",
    "WandbWatcher",
    "MlflowWatcher",
    "JsonLines",
    "TensorBoard",
    "Terminal",
]
