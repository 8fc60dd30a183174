"""Checkpoints of a run: the model, its optimizers, the position in the data, and the random generators of each rank.

    <log_dir>/checkpoints/step-1000        one folder per checkpoint: see tilerec/checkpoint

A checkpoint also holds the run file and the vocabularies, so a copy of its folder is enough to evaluate the model.

The bits of a run that continues on the same number of ranks are those of a run without an interruption. Another number
of ranks continues with the same global batches; its generators of dropout begin with the seed. Loss and AUC of the log
entries go on in both cases.

A run that saves checkpoints also saves when it is stopped: by SIGTERM, SIGUSR1 or Ctrl-C, on any of its ranks.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from tilerec.checkpoint.manager import CheckpointManager, Found, latest, read_metadata, whole_checkpoints
from tilerec.errors import CommsError, ConfigError, TilerecError
from tilerec.spec.plan import ShardingPlan
from tilerec.stop_signals import RunStopped, StopSignals, stop_request
from tilerec.train.config import RunConfig
from tilerec.train.load_attempts import MOST, LoadAttempts
from tilerec.train.rank_votes import RankVotes
from tilerec.train.run_metadata import FOLDER, RunMetadata
from tilerec.train.vocabulary_files import VOCABULARY_PART, vocabulary_tensors
from tilerec.train.world import World

if TYPE_CHECKING:
    from tilerec.train.training_run import Run


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
        self._saves = options.saves
        self._seconds = options.seconds
        self._since = time.monotonic()
        self._attempts = LoadAttempts(config.log_dir)
        self._votes = RankVotes(world.group, questions=2)
        self._metadata = RunMetadata(config, world.size)
        self._vocabulary: dict[str, Tensor] | None = None
        self._request: StopSignals | None = None
        self._stops = False

    @staticmethod
    def of(config: RunConfig, world: World) -> RunCheckpoints | None:
        """Return the checkpoints of a run; None if it has none."""
        options = config.checkpoint
        return RunCheckpoints(config, world) if options.saves or options.resume else None

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
            raise self._stopped(run)

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
            "settings": self._metadata.settings(),
        }
        if self._vocabulary is None:
            self._vocabulary = vocabulary_tensors(run.dataset.vocabularies())
        if self._vocabulary:
            parts[VOCABULARY_PART] = self._vocabulary
        self._manager.save(run.steps, parts, self._metadata.of(parts["model"]))
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
                raise self._stopped(run)

    def _stopped(self, run: Run) -> RunStopped:
        return RunStopped(run.steps, 0 if self._request is None else self._request.take())

    def leave(self) -> None:
        """Wait for the running save after a failure, where no other rank can keep it from its end."""
        self._manager.leave()

    def newest(self) -> int:
        """Return the step of the newest whole checkpoint; -1 if there is none. Collective."""
        found = latest(self._manager.folder, group=self._world.group)
        return -1 if found is None else found.step

    def saved_plan(self, compute_device: str) -> ShardingPlan | None:
        """Return the plan of the newest whole checkpoint if this run continues it on the same ranks and hosts.

        None, too, if the tables or settings of sharding have changed, or name a plan, and for a run with replicas.
        Collective.
        """
        group = self._world.group
        found = latest(self._manager.folder, group=group) if self._config.checkpoint.resume and group else None
        if found is None or group is None:
            return None
        return self._metadata.saved_plan(read_metadata(found.path), found.path, group, compute_device)

    def resume(self, run: Run) -> bool:
        """Continue from the newest whole checkpoint; return False if there is none. Collective.

        If two starts of the run did not survive its load, the one before it is loaded.

        Raises:
            ConfigError: its samples or batches are others than those of this run, or it does not fit the model.
        """
        whole = whole_checkpoints(self._manager.folder, group=self._world.group)
        if not whole:
            return False
        step = self._first_to_load(whole)
        values = dict.fromkeys(("run", "random", "losses", "windows", "settings"))
        parts = run.parts()
        try:
            found = self._manager.resume(
                {**parts, **values}, changes=self._config.checkpoint.changes, newest=step,
                check=lambda path, state: self._metadata.check(path, state, parts.get("dense")),
            )  # fmt: skip
        except (TilerecError, KeyboardInterrupt) as error:
            # A lost peer may have died of the load; other errors have another cause than the checkpoint.
            if not self._world.rank and not isinstance(error, CommsError):
                self._attempts.end(step)
            raise
        if not self._world.rank:
            self._attempts.end(step)
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

    def _first_to_load(self, whole: Sequence[Found]) -> int:
        """Return the step of the checkpoint to load, by rank 0's count of loads that did not end. Collective."""
        step = 0 if self._world.rank else self._attempts.begin(whole)
        if self._world.group is not None:
            steps: list[Any] = self._world.group.all_gather_object(step)
            step = steps[0]
        if step != whole[0].step:
            warnings.warn(
                f"Checkpoint {whole[0].path}: {MOST} starts did not survive its load. {step} is loaded.", stacklevel=3
            )
        return step
