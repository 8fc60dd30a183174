"""`RunSaves`: what a run writes of its state between two steps: checkpoints, and published states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from torch import nn

from tilerec.train.config import RunConfig
from tilerec.train.run_checkpoints import RunCheckpoints
from tilerec.train.run_deltas import RunDeltas
from tilerec.train.world import World

if TYPE_CHECKING:
    from tilerec.train.training_run import Run


@final
class RunSaves:
    """The checkpoints and published states of a run; it may have none of either.

    Args:
        checkpoints: None for none.
    """

    def __init__(self, config: RunConfig, world: World, checkpoints: RunCheckpoints | None) -> None:
        self._checkpoints = checkpoints
        self._deltas = RunDeltas.of(config, world)
        self._due: list[RunCheckpoints | RunDeltas] = []

    def begin(self, model: nn.Module) -> None:
        """Prepare for the first step; the model has the state that it begins with. Collective."""
        if self._deltas is not None:
            self._deltas.begin(model)

    @contextmanager
    def stops(self) -> Iterator[None]:
        """Stop the run on signals during the block, if it saves checkpoints. `save` then raises after its save."""
        if self._checkpoints is None:
            yield
            return
        with self._checkpoints.stops():
            try:
                yield
            except BaseException:
                self._checkpoints.leave()
                raise

    @property
    def can_continue(self) -> bool:
        """True if a later run may continue this one from a checkpoint, with the same bits."""
        return self._checkpoints is not None

    def due(self, step: int) -> bool:
        """Return True if something is to be written after this many steps. Collective; called for each, in order."""
        both = (self._deltas, self._checkpoints)  # a checkpoint may end the run
        self._due = [one for one in both if one is not None and one.due(step)]
        return bool(self._due)

    def save(self, run: Run) -> None:
        """Write what is due. Collective.

        Raises:
            RunStopped: the run was saved to stop.
        """
        for one in self._due:
            one.save(run)

    def save_last(self, run: Run) -> None:
        """Write everything after the last step. Collective.

        Raises:
            RunStopped: a signal has come in the last steps, so the final scores are left to the next start.
        """
        for one in (self._deltas, self._checkpoints):
            if one is not None:
                one.save_last(run)
