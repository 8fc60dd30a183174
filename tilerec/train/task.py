"""`Task`: the goal of a run, that is, its loss, its scores and its predictions.

    [task]                       RunConfig(
    kind = "retrieval"               task=RetrievalTask(
    temperature = 0.1                    temperature=0.1,
                                     ),
                                 )

The train loop and the commands use these methods only:

    loss        of a rank's share of a global batch, scaled as `loss.py` explains
    progress    measures of training since the last log entry
    state_dict  counters and estimates that the next loss depends on
    window_state  samples of the latest batches that the next measures depend on
    evaluate    scores of a model on labelled samples
    predict     tables of predictions for the rows of files

Legend: W ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.data.dataset import RowDataset
from tilerec.data.share import Share
from tilerec.errors import ConfigError
from tilerec.train.scores import HeldOutScores


class Evaluation(NamedTuple):
    """Result of `Task.evaluate`.

    Attributes:
        tasks: scores by name of the task.
        labels: of the samples, in order, for tasks with probabilities; None for others.
    """

    tasks: Mapping[str, HeldOutScores]
    labels: Tensor | None = None


def check_state(task: Task, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise a `ConfigError` unless a state has these entries and no others."""
    if set(state) != set(names):
        raise ConfigError(
            f"{type(task).__name__}: got a state with the entries {sorted(state)}; expected {sorted(names)}. Load the "
            "state of a run with the same task settings."
        )


class Task(ABC):
    """A task of one run, with its state. All ranks call the methods in the same order."""

    def check(self, batch: Batch) -> None:  # noqa: B027 - most tasks accept every batch
        """Raise `InputError` for a training batch that the task cannot use; called before the batch's step."""

    @abstractmethod
    def loss(self, model: nn.Module, share: Share) -> Tensor:
        """Return the scalar loss of a rank's share: its part of the sum over the global batch, times W / divisor.

        Args:
            model: called with (dense features, sparse features); it averages dense gradients over ranks.
            share: on the model's device. It may be empty; the loss then depends on every dense parameter all the same.
        """

    def progress(self) -> dict[str, float]:
        """Return measures of the training batches since the last call, by name. Collective."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later losses depend on, besides the model's; alike on every rank. Most tasks have none.

        Values are numbers, or tensors that stay as they are when training continues.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`.

        Raises:
            ConfigError: the state is of another task, or of another size.
        """
        check_state(self, state, ())

    def window_state(self) -> dict[str, Any]:
        """Return the state that later measures of `progress` depend on; alike on every rank. Most tasks have none.

        Collective: the state is that of all ranks together, so any number of ranks continues with it.
        """
        return {}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `window_state`; without entries, the measures begin anew."""
        check_state(self, state, ())

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
        """Return the scores of a model. Collective: every rank passes the same batches.

        The model is in training mode afterwards if it was before.
        """

    @abstractmethod
    def prediction_columns(self) -> Sequence[str]:
        """Return the names of the columns that `predict` adds to the key columns."""

    @abstractmethod
    def predict(
        self, model: nn.Module, dataset: RowDataset, keys: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the number of samples of each batch and the table of its predictions, on every rank. Collective."""
