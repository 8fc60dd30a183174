"""Published states of a run: what its steps have changed, for models that serve (tilerec/delta).

    <log_dir>/deltas/base-0  delta-1  delta-2 …

A run that continues from a checkpoint goes on with its log, also if the log is ahead of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, final

from torch import nn

from tilerec.delta.writer import DeltaWriter
from tilerec.errors import ConfigError
from tilerec.train.config import RunConfig
from tilerec.train.world import World

if TYPE_CHECKING:
    from tilerec.train.training_run import Run

FOLDER = "deltas"


@final
class RunDeltas:
    """Publishes the states of a run every so many steps, and after the last.

    Args:
        config: of the run, with a `log_dir`.
        world: the ranks.

    Raises:
        ConfigError: the run has no `log_dir`.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        if not config.log_dir:
            raise ConfigError("delta: got log_dir = ''; expected a folder, in which states are published. Set log_dir.")
        self._options, self._group = config.delta, world.group
        self._folder = Path(config.log_dir) / FOLDER
        self._writer: DeltaWriter | None = None
        self._last = -1

    @staticmethod
    def of(config: RunConfig, world: World) -> RunDeltas | None:
        """Return the published states of a run; None if it publishes none."""
        return RunDeltas(config, world) if config.delta.every else None

    def begin(self, model: nn.Module) -> None:
        """Observe the model, which has the state that the steps begin with. Collective."""
        options = self._options
        self._writer = DeltaWriter(
            self._folder, model, max_bytes=options.max_bytes or None, base_every=options.base_every or None,
            keep_bases=options.keep_bases, group=self._group,
        )  # fmt: skip

    def due(self, step: int) -> bool:
        """Return True if a state is due after this many steps."""
        return step % self._options.every == 0

    def save(self, run: Run) -> None:
        """Publish the present state, once. Collective."""
        if run.steps != self._last and self._writer is not None:
            self._writer.publish(run.steps)
            self._last = run.steps

    def save_last(self, run: Run) -> None:
        """Publish the state after the last step. Collective."""
        self.save(run)
