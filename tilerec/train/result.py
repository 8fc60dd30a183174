"""`RunResult`: the scores and counts of a finished run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from tilerec.data.dataset import Dataset
from tilerec.data.delimited import RowCount
from tilerec.train.config import RunConfig
from tilerec.train.evaluate import Scores
from tilerec.train.scores import HeldOutScores, mean_scores, score_record
from tilerec.train.task import Evaluation
from tilerec.train.training_run import Run
from tilerec.train.world import World


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    Attributes:
        name: of the recipe.
        steps, samples: number of training steps and samples.
        seconds: of training, without the evaluations.
        held_out: scores on the held-out part after the last step, `Scores` of a click task; the mean over the tasks.
        tasks: scores of each task, by name.
        best: scores of the true probabilities on the held-out part, if the dataset has them.
        best_expected_auc: AUC of the true probabilities, expected over labels drawn from them.
        rows: counts of read and skipped rows of the source.
        model: the trained model; on several ranks, with this rank's tiles.
        log_dir: folder of the logs; "" for none.
        ranks: number of ranks that trained together.
        log_errors: one message per log that could not be written completely, on the rank that writes logs.
    """

    name: str
    steps: int
    samples: int
    seconds: float
    held_out: HeldOutScores
    best: Scores | None
    best_expected_auc: float | None
    rows: RowCount
    model: nn.Module
    log_dir: str
    ranks: int = 1
    log_errors: tuple[str, ...] = ()
    tasks: Mapping[str, HeldOutScores] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Training samples per second of training, including the time to read the data."""
        return self.samples / self.seconds if self.seconds else math.nan


def summary(result: RunResult) -> dict[str, object]:
    """Return the result as JSON values."""
    return {
        "recipe": result.name,
        "steps": result.steps,
        "samples": result.samples,
        "seconds": result.seconds,
        "samples_per_second": result.samples_per_second,
        "held_out": score_record(result.held_out),
        "tasks": {name: score_record(scores) for name, scores in result.tasks.items()},
        "best": None if result.best is None else score_record(result.best),
        "best_expected_auc": result.best_expected_auc,
        "rows": asdict(result.rows),
        "torch": torch.__version__,
        "ranks": result.ranks,
        "threads": torch.get_num_threads(),
    }


def best_scores(dataset: Dataset, labels: Tensor | None) -> tuple[Scores | None, float | None]:
    """Return the scores of the true probabilities, and their expected AUC, if the dataset has them."""
    if labels is None or labels.dim() != 1:
        return None, None
    true = dataset.best_predictions()
    if true is None:
        return None, None
    return Scores.of(true, labels), Scores.of(true, true).auc


def run_result(
    config: RunConfig, dataset: Dataset, model: nn.Module, run: Run, held_out: Evaluation, world: World
) -> RunResult:
    """Return the result of a run that has ended."""
    best, expected = best_scores(dataset, held_out.labels)
    return RunResult(
        name=config.name,
        steps=run.steps,
        samples=run.samples,
        seconds=run.seconds,
        held_out=mean_scores(held_out.tasks.values()),
        tasks=held_out.tasks,
        best=best,
        best_expected_auc=expected,
        rows=dataset.row_count(),
        model=model,
        log_dir=config.log_dir,
        ranks=world.size,
    )
