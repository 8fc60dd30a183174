"""`Run`: a run in progress, that is, the steps between two log events and the events themselves.

    for each batch:  clear gradients, set learning rates
                     loss = the task's loss of the batch
                     backward (updates tables), step (updates all other parameters)

Numbers stay on the device between two log events. Reading them is the run's only wait for the device.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilerec.data.dataset import Dataset
from tilerec.data.share import Share
from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.ops.runtime.readback import drain
from tilerec.parallel.check_replicas import check_replicas
from tilerec.pipelines.train_pipelines import PrefetchTrainPipelineSparseDist
from tilerec.train.config import RunConfig
from tilerec.train.optimizers import Optimizers
from tilerec.train.run_logger import Event, Watcher
from tilerec.train.run_memory import RunMemory
from tilerec.train.run_saves import RunSaves
from tilerec.train.scores import mean_scores
from tilerec.train.table_stats import TableStats
from tilerec.train.task import Evaluation, Task
from tilerec.train.world import World


class Run:
    """A run in progress: model, optimizers, counters."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        model: nn.Module,
        device: torch.device,
        world: World,
        all_watchers: list[Watcher],
        saves: RunSaves,
        memory: RunMemory | None = None,
    ) -> None:
        self._config = config
        self._options = config.train
        self._dataset = dataset
        self._model = model
        self._device = device
        self._world = world
        self._watchers = all_watchers
        self._saves = saves
        self._memory = memory
        self._optimizers = Optimizers(model, config.train)
        self._step_module = world.data_parallel(model, fixed_order=saves.can_continue or memory is not None)
        self._pipeline = PrefetchTrainPipelineSparseDist(
            model, self, device, custom_model_fwd=self._forward, group=world.group, even=False
        )  # every rank has a share of every global batch, so all have equally many
        if config.trace:
            self._pipeline.start_trace()
        self._task = config.task.build(dataset, config.train, device, world)
        stages = ["read", *(stage.name for stage in self._pipeline.stages)]
        self._table_stats = TableStats(model, world, self._pipeline.times, stages)
        self._timed_steps, self._timed_seconds = 0, 0.0  # up to the last event, or to the start of this process
        self._since = 0.0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._logged_steps = 0
        self._apart = ""
        self._epoch = 0
        self._position = 0
        self.steps = 0
        self.samples = 0
        self.seconds = 0.0

    def learn(self) -> None:
        """Train for all epochs, or up to `max_steps`.

        Raises:
            RunStopped: a signal has stopped the run, and it is saved.
        """
        with self._world.reporting(self.where), self._saves.stops():
            try:
                if self._memory is not None:
                    self._memory.begin(self)
                self._learn()
            except BaseException as error:
                lost = (
                    self._world.failure(f"step {self.steps + 1}", error) if isinstance(error, RuntimeError) else error
                )
                if lost is error:
                    raise
                raise lost from error
            finally:
                self._table_stats.close()

    def where(self) -> str:
        """Return what this rank does, for the ranks that wait for it; another thread calls it."""
        return f"step {self.steps + 1}, {self._apart or self._pipeline.stage}"

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Name what this rank does in the block, apart from the stages of its steps."""
        self._apart = what
        try:
            yield
        finally:
            self._apart = ""

    def _learn(self) -> None:
        self._model.train()
        shares = self._shares()
        self._since = time.perf_counter()
        self._saves.begin(self._model)
        while self._steps_to_save(shares):
            self._stop_clock()
            with self._doing("checkpoint"), self._table_stats.paused():
                self._saves.save(self)
            self._since = time.perf_counter()
        if not self.steps:
            raise ConfigError("The training part has no samples. Use more data, or hold out less of it.")
        if self.steps > self._logged_steps:
            self._log()
        with self._doing("checkpoint"):
            self._saves.save_last(self)
        if self._config.trace:
            try:
                self._pipeline.write_trace(self._config.trace)
            except FileError as error:  # the trained model counts more
                warnings.warn(f"{error} The run continues without a trace.", stacklevel=2)

    def _steps_to_save(self, shares: Iterator[tuple[int, Share]]) -> bool:
        """Train up to the step at which a checkpoint or a published state is due, or to the end; return False there.

        The pipeline works on later batches ahead of their steps. It gets none beyond that step: ids that managed
        collision has seen are part of the checkpoint.
        """
        options, ended = self._options, True

        def until_due() -> Iterator[tuple[int, Share]]:
            nonlocal ended
            for step, numbered in enumerate(shares, self.steps + 1):
                yield numbered
                if self._saves.due(step):
                    ended = False
                    return

        for epoch, share, loss in self._pipeline.outputs(until_due()):
            self._epoch, self._position = epoch, share.end
            self.steps += 1
            self.samples += share.total
            self._loss_sum += loss
            if options.check_replicas_every and self.steps % options.check_replicas_every == 0:
                with self._table_stats.paused():
                    check_replicas(self._model)
            if self.steps % options.log_every == 0:
                self._log()
                self._since = time.perf_counter()
            if options.eval_every and self.steps % options.eval_every == 0 and self.steps != options.max_steps:
                self._wait()
                self._stop_clock()
                self.evaluate()
                self._since = time.perf_counter()
            if self._memory is not None:
                self._memory.step_ended(self)
        return not ended

    def _stop_clock(self) -> None:
        """Add the time since the last stop to the seconds of training."""
        self.seconds += time.perf_counter() - self._since

    @property
    def continues(self) -> bool:
        """True if the run goes on with the logs of an earlier one."""
        return self._config.checkpoint.resume or (self._memory is not None and self._memory.attempt > 0)

    def finish(self) -> None:
        """Wait for the other ranks to come to the end of the run, if killed ones are replaced. Collective."""
        if self._memory is not None:
            self._memory.finish()

    def hand_over(self, error: BaseException) -> None:
        """Leave the last steps to the ranks that are started anew, if the run has lost a peer that will be replaced."""
        if self._memory is not None:
            self._memory.hand_over(error)

    @property
    def dataset(self) -> Dataset:
        """The data that the run trains on."""
        return self._dataset

    def parts(self) -> dict[str, Any]:
        """Return the parts of the run with a state of their own: the model and its optimizers."""
        return {"model": self._model, **self._optimizers.parts}

    def evaluate(self) -> Evaluation:
        """Return the scores on the held-out part, and log their means over the task's parts. Collective."""
        with self._doing("evaluation"), self._world.reporting(self.where), self._table_stats.paused():
            found = self._task.evaluate(self._model, self._dataset.held_out(self._options.eval_batch_size))
        self._emit("eval", mean_scores(found.tasks.values()).numbers)
        return found

    def _log(self) -> None:
        """Send the progress since the last event, with the use of the tables, to every watcher. Collective."""
        with self._table_stats.paused():
            values = self._progress()
            # Reading the values has waited for the device, so the elapsed time includes the device's work.
            self._stop_clock()
            use = self._table_stats.values(self.seconds - self._timed_seconds, self.steps - self._timed_steps)
            self._timed_steps, self._timed_seconds = self.steps, self.seconds
            self._emit("train", {**values, "samples_per_second": self.samples / self.seconds, **use})

    def _emit(self, kind: Literal["train", "eval"], values: dict[str, float]) -> None:
        """Send an event to every watcher."""
        event = Event(kind, self.steps, self.samples, values)
        with self._doing("log entry"):
            for watcher in self._watchers:
                watcher.record(event)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run in its data, its counters, and this rank's generators and losses.

        With the states of the model and of its optimizers, a run continues with the bits of a run without an
        interruption. The order of the data is a function of the data's seed, the epoch and the position. So all entries
        but `random` and `loss` are alike on every rank, and continue a run on any number of ranks.

        Entries:
            epoch, position, steps, samples, seconds, logged_steps: numbers.
            task: see `Task.state_dict`.
            random: states of torch's default generators, by device: those of dropout, for example.
            loss: sum of this rank's losses since the last event.
        """
        return {**self.counters(), "random": self._random_states(), "loss": self._loss_sum.item()}

    def counters(self) -> dict[str, Any]:
        """Return the entries of `state_dict` that are alike on every rank."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "steps": self.steps,
            "samples": self.samples,
            "seconds": self.seconds,
            "logged_steps": self._logged_steps,
            "task": self._task.state_dict(),
        }

    def own_record(self, device: torch.device) -> Tensor:
        """Return this rank's other entries as bytes, uint8 `[N]` on a device, without a wait for a GPU.

        The loss is left out if it is on another device.
        """
        entries = list(self._random_states().values())
        if self._loss_sum.device == device:
            entries.append(self._loss_sum.reshape(1).view(torch.uint8))
        return torch.cat([entry.to(device) for entry in entries])

    def load_record(self, counters: Mapping[str, Any], record: Tensor) -> None:
        """Continue from `counters` and from a record of `own_record`, on the CPU."""
        states = self._random_states()
        sizes = [state.numel() for state in states.values()]
        *random, loss = record.split([*sizes, record.numel() - sum(sizes)])
        own: dict[str, Any] = {"random": {name: one.clone() for name, one in zip(states, random, strict=True)}}
        if loss.numel():
            own["loss"] = loss.clone().view(torch.float64).item()
        self.load_state_dict({**counters, **own})

    @property
    def task(self) -> Task:
        """The task, with its state."""
        return self._task

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step at which `state_dict` was called; call it before `learn`.

        Args:
            state: of this rank. Leave `random` out if the number of ranks has changed. Without `loss`, events begin
                anew.

        Raises:
            ConfigError: the state is of a run with another task.
        """
        self._task.load_state_dict(state["task"])
        random = state.get("random", {})
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        if "cuda" in random and self._device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self._device)
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self.steps, self.samples = int(state["steps"]), int(state["samples"])
        self.seconds = float(state["seconds"])
        self._timed_steps, self._timed_seconds = self.steps, self.seconds
        self._logged_steps = int(state["logged_steps"]) if "loss" in state else self.steps
        self._loss_sum.fill_(state.get("loss", 0.0))

    def _random_states(self) -> dict[str, Tensor]:
        """Return the states of torch's default generators on the CPU and on the run's GPU."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _shares(self) -> Iterator[tuple[int, Share]]:
        """Yield the remaining shares with their epochs; the pipeline reads them ahead of their steps."""
        left = self._options.max_steps - self.steps if self._options.max_steps else None
        yield from itertools.islice(self._remaining_shares(), left)

    def _remaining_shares(self) -> Iterator[tuple[int, Share]]:
        start = self._position
        for epoch in range(self._epoch, self._options.epochs):
            for share in self._dataset.train_shares(
                self._options.batch_size,
                epoch,
                rank=self._world.rank,
                world_size=self._world.size,
                start=start,
            ):
                self._task.check(share.batch)
                yield epoch, share
            start = 0

    def zero_grad(self) -> None:
        """Clear gradients and set the learning rates of this step; the pipeline calls it."""
        self._optimizers.prepare(self.steps)

    def step(self) -> None:
        """Update the dense parameters; the pipeline calls it after the backward."""
        self._optimizers.step()

    def _forward(self, numbered: tuple[int, Share]) -> tuple[Tensor, tuple[int, Share, Tensor]]:
        """Return the loss, and the epoch and the share with this rank's part of the loss, on the device."""
        epoch, share = numbered
        loss = self._task.loss(self._step_module, share)
        return loss, (epoch, share, loss.detach())

    def _progress(self) -> dict[str, float]:
        """Return the mean loss and the task's measures since the last event; waits for the device."""
        drain(self._device)
        loss = self._world.mean(self._loss_sum).item() / (self.steps - self._logged_steps)
        if not math.isfinite(loss):
            raise TilerecError(
                f"The loss is {loss} after step {self.steps}. Lower train.embedding_optimizer.lr or "
                "train.dense_optimizer.lr, or look for values that are not finite in the dense features."
            )
        self._loss_sum.zero_()
        self._logged_steps = self.steps
        factor = self._options.lr_factor(self.steps - 1)
        return {"loss": loss, **self._task.progress(), "lr_factor": factor}

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
