"""Checkpoints of a run: the model, its optimizers, the position in the data, and the random generators of each rank.

    <log_dir>/checkpoints/step-1000        one folder per checkpoint: see tilerec/checkpoint

The bits of a run that continues on the same number of ranks are those of a run without an interruption. Another number
of ranks continues with the same global batches; its generators of dropout begin with the seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from tilerec.checkpoint.manager import CheckpointManager
from tilerec.errors import ConfigError
from tilerec.train.config import RunConfig
from tilerec.train.override import settings
from tilerec.train.world import World

if TYPE_CHECKING:
    from tilerec.train.run import Run

FOLDER = "checkpoints"
_PLACES = ("path", "base", "read_ahead_mb")
"""Settings of data that do not change the samples or their order."""


@final
class RunCheckpoints:
    """Saves a run when a checkpoint is due, and continues it.

    Args:
        config: of the run, with a `log_dir`.
        world: the ranks.

    Raises:
        ConfigError: the run has no `log_dir`.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        if not config.log_dir:
            raise ConfigError(
                "checkpoint: got log_dir = ''; expected a folder, in which checkpoints are kept. Set log_dir."
            )
        options = config.checkpoint
        self._config, self._world = config, world
        self._manager = CheckpointManager(
            Path(config.log_dir) / FOLDER,
            every=options.every,
            seconds=options.seconds,
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            asynchronous=options.asynchronous,
            incremental=options.incremental,
            group=world.group,
        )

    @staticmethod
    def of(config: RunConfig, world: World) -> RunCheckpoints | None:
        """Return the checkpoints of a run; None if it has none."""
        options = config.checkpoint
        return RunCheckpoints(config, world) if options.every or options.seconds or options.resume else None

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due after this many steps. Collective with `checkpoint.seconds`."""
        return self._manager.due(step)

    def save(self, run: Run) -> None:
        """Save the run at its present step. Collective."""
        state = run.state_dict()
        own = (state["seconds"], state.pop("random"))
        every: list[Any] = [own] if self._world.group is None else self._world.group.all_gather_object(own)
        # Each rank has a clock of its own.
        state["seconds"] = every[0][0]
        parts = {
            **run.parts(),
            "run": state,
            "random": {str(rank): generators for rank, (_, generators) in enumerate(every)},
            "settings": self._settings(),
        }
        self._manager.save(run.steps, parts, {"run": self._config.name, "ranks": self._world.size})

    def save_last(self, run: Run) -> None:
        """Save the run after its last step, unless it resumes only. Collective."""
        options = self._config.checkpoint
        if options.every or options.seconds:
            self.save(run)
            self._manager.wait()

    def leave(self) -> None:
        """Wait for the running save after a failure, where no other rank can keep it from its end."""
        self._manager.leave()

    def resume(self, run: Run) -> bool:
        """Continue from the newest whole checkpoint; return False if there is none. Collective.

        Raises:
            ConfigError: its samples or batches are others than those of this run, or it does not fit the model.
        """
        values = dict.fromkeys(("run", "random", "settings"))
        found = self._manager.resume({**run.parts(), **values}, check=self._check)
        if found is None:
            return False
        _, state = found
        generators: Mapping[str, Any] = state["random"]
        own = {"random": generators[str(self._world.rank)]} if len(generators) == self._world.size else {}
        run.load_state_dict({**state["run"], **own})
        return True

    def _settings(self) -> dict[str, str]:
        """Return the settings that decide which samples a position stands for."""
        return {
            name: str(value)
            for name, value in settings(self._config).items()
            if (name.startswith("data.") and name.rsplit(".", 1)[-1] not in _PLACES) or name == "train.batch_size"
        }

    def _check(self, path: str, state: Mapping[str, Any]) -> None:
        before, now = state["settings"], self._settings()
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise ConfigError(
                    f"Checkpoint {path}: got {name} = {now.get(name, 'nothing')}; expected "
                    f"{before.get(name, 'nothing')}, with which it was trained. Set it, or train in another log_dir."
                )
