"""Checkpoints of a run: the model, its optimizers, the position in the data, and the random generators of each rank.

    <log_dir>/checkpoints/step-1000        one folder per checkpoint: see tilerec/checkpoint

The bits of a run that continues on the same number of ranks are those of a run without an interruption. Another number
of ranks continues with the same global batches; its generators of dropout begin with the seed. Loss and AUC of the log
entries go on in both cases.

A run that saves checkpoints also saves when it is stopped: by SIGTERM or SIGUSR1, on any of its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from tilerec.checkpoint.manager import CheckpointManager, latest
from tilerec.errors import ConfigError
from tilerec.stop_signals import RunStopped, StopSignals, stop_request
from tilerec.train.config import RunConfig
from tilerec.train.override import settings
from tilerec.train.rank_votes import RankVotes
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
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            asynchronous=options.asynchronous,
            incremental=options.incremental,
            group=world.group,
        )
        self._saves = bool(options.every or options.seconds)
        self._seconds = options.seconds
        self._since = time.monotonic()
        self._votes = RankVotes(world.group, questions=2)
        self._request: StopSignals | None = None
        self._stops = False

    @staticmethod
    def of(config: RunConfig, world: World) -> RunCheckpoints | None:
        """Return the checkpoints of a run; None if it has none."""
        options = config.checkpoint
        return RunCheckpoints(config, world) if options.every or options.seconds or options.resume else None

    @contextmanager
    def stops(self) -> Iterator[None]:
        """Stop the run on signals during the block: `due` then returns True, and `save` raises after the save."""
        if not self._saves:
            yield
            return
        with stop_request() as self._request:
            yield

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due after this many steps: by their number, by time, or to stop. Collective.

        Called for each step, in order.
        """
        if not self._saves:
            return False
        late = bool(self._seconds) and not self._world.rank and time.monotonic() - self._since >= self._seconds
        stop, late = self._votes.at(step, (self._requested, late))
        self._stops = self._stops or stop
        return self._manager.due(step) or late or stop

    @property
    def _requested(self) -> bool:
        return self._request is not None and self._request.requested

    def save(self, run: Run) -> None:
        """Save the run at its present step. Collective.

        Raises:
            RunStopped: the run was saved to stop.
        """
        self._save(run)
        if self._stops:
            self._manager.wait()
            raise RunStopped(run.steps)

    def _save(self, run: Run) -> None:
        state = run.state_dict()
        own = (state["seconds"], state.pop("random"), state.pop("loss"))
        every: list[Any] = [own] if self._world.group is None else self._world.group.all_gather_object(own)
        # Each rank has a clock of its own.
        state["seconds"] = every[0][0]
        parts = {
            **run.parts(),
            "run": state,
            "random": {str(rank): generators for rank, (_, generators, _) in enumerate(every)},
            "losses": [loss for _, _, loss in every],
            "windows": run.task.window_state(),
            "settings": self._settings(),
        }
        self._manager.save(run.steps, parts, {"run": self._config.name, "ranks": self._world.size})
        self._since = time.monotonic()

    def save_last(self, run: Run) -> None:
        """Save the run after its last step, unless it resumes only. Collective.

        Raises:
            RunStopped: a signal has come in the last steps, so the final scores are left to the next start.
        """
        if self._saves:
            self._save(run)
            self._manager.wait()
            self._stops = self._votes.decide((self._requested, False))[0]
            if self._stops:
                raise RunStopped(run.steps)

    def leave(self) -> None:
        """Wait for the running save after a failure, where no other rank can keep it from its end."""
        self._manager.leave()

    def newest(self) -> int:
        """Return the step of the newest whole checkpoint; -1 if there is none. Collective."""
        found = latest(self._manager.folder, group=self._world.group)
        return -1 if found is None else found.step

    def resume(self, run: Run) -> bool:
        """Continue from the newest whole checkpoint; return False if there is none. Collective.

        Raises:
            ConfigError: its samples or batches are others than those of this run, or it does not fit the model.
        """
        values = dict.fromkeys(("run", "random", "losses", "windows", "settings"))
        found = self._manager.resume({**run.parts(), **values}, check=self._check)
        if found is None:
            return False
        _, state = found
        losses: list[float] = state["losses"]
        own = {"loss": sum(losses) / len(losses)}  # events have the mean over the ranks
        if len(losses) == self._world.size:
            own = {"random": state["random"][str(self._world.rank)], "loss": losses[self._world.rank]}
        run.load_state_dict({**state["run"], **own})
        run.task.load_window_state(state["windows"])
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
