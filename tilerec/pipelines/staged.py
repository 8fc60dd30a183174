"""`StagedTrainPipeline`: user-defined stages that prepare batches ahead; the caller trains.

stages  to device, augment        batch 2: to device | batch 1: augment | batch 0: returned
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch

from tilerec.errors import ConfigError
from tilerec.pipelines.batch_structure import record_stream
from tilerec.pipelines.stage_times import StageTimes
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.storage.prefetched_results import StreamEvent

StageOut = TypeVar("StageOut")


@dataclass
class PipelineStage:
    """One stage: a function from the previous stage's result to its own.

    Attributes:
        name: of the stage.
        runnable: called once per batch.
        stream: on a GPU, the stream on which it runs; the next stage's stream waits for it. None: the current stream.
        fill_callback: called after the first batch of a pass has run through this stage.
        data_exhausted_callback: called once when the stage has run for the last batch of a pass.
    """

    name: str
    runnable: Callable[[Any], Any]
    stream: torch.cuda.Stream | None = None
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


_NOTHING = object()


@dataclass
class _Prepared:
    """A batch after some stages."""

    value: Any
    made: StreamEvent | None = None

    def arrive(self) -> None:
        """Make the current stream wait for the stage, and keep the batch's memory until the stream has used it."""
        if self.made is not None:
            self.made.wait(())
            record_stream(self.value, torch.cuda.current_stream(self.made.stream.device))


@final
class StagedTrainPipeline:
    """Pipeline of user-defined stages. S stages keep up to S batches in flight.

    Args:
        pipeline_stages: in order; names differ.
        debug_mode: accepted with a warning; no effect.
        compute_stream: on a GPU, the stream that uses the prepared batches; None: the current stream.
        on_flush_end: called when a flush has ended.

    Attributes:
        times: time of each stage by its name, and of "read".

    Raises:
        ConfigError: there is no stage, or two stages have one name.
    """

    def __init__(
        self, pipeline_stages: Sequence[PipelineStage], debug_mode: bool = False,
        compute_stream: torch.cuda.Stream | None = None, on_flush_end: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        names = [stage.name for stage in pipeline_stages]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"StagedTrainPipeline: pipeline_stages: got stages {names}; expected at least one stage, each with a "
                "name of its own."
            )
        reason = {"debug_mode": "errors of stages are raised as they are"}
        warn_ignored_settings("StagedTrainPipeline", {"debug_mode": debug_mode}, reason, 2)
        self._stages = list(pipeline_stages)
        self._compute_stream, self._on_flush_end = compute_stream, on_flush_end
        self._flushing = False
        self.times = StageTimes()
        self._reset()

    def _reset(self) -> None:
        # By stage: the batch that has run through it and waits for the next one.
        self._waiting: list[_Prepared | None] = [None] * len(self._stages)
        self._filled = [False] * len(self._stages)
        self._ready: deque[_Prepared] = deque()
        self._ended = [False] * len(self._stages)

    @property
    def num_stages(self) -> int:
        """S, the number of stages."""
        return len(self._stages)

    def set_flush(self, flush: bool) -> None:
        """Read no more batches until all batches in flight have been returned; then `progress` reads again."""
        self._flushing = flush

    def flush_end(self) -> None:
        """End a flush: `progress` reads again."""
        self._flushing = False
        if self._on_flush_end is not None:
            self._on_flush_end()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Return the next prepared batch, or None after the last one; then a new pass may begin.

        An error of a stage drops the batch that it ran for.
        """
        while not self._ready:
            if all(one is None for one in self._waiting):
                if self._flushing:
                    self.flush_end()
                if self._ended[0]:
                    for index in range(len(self._stages)):
                        self._exhausted(index)
                    self._reset()
                    return None
            self._advance(dataloader_iter)
        ready = self._ready.popleft()
        with self._on(self._compute_stream):
            ready.arrive()
        return ready.value

    def _advance(self, iterator: Iterator[Any]) -> None:
        """Move every batch in flight by one stage, the oldest first, and read the next batch."""
        if self._waiting[-1] is not None:
            self._ready.append(self._waiting[-1])
            self._waiting[-1] = None
        for index in range(len(self._stages) - 1, 0, -1):
            before, self._waiting[index - 1] = self._waiting[index - 1], None
            if before is not None:
                self._waiting[index] = self._run(index, before)
            elif self._ended[index - 1]:
                self._exhausted(index)
        if not self._flushing and not self._ended[0]:
            with self.times.span("read"):
                value = next(iterator, _NOTHING)
            if value is _NOTHING:
                self._exhausted(0)
            else:
                self._waiting[0] = self._run(0, _Prepared(value))

    def _run(self, index: int, before: _Prepared) -> _Prepared:
        stage = self._stages[index]
        with self.times.span(stage.name), self._on(stage.stream):
            before.arrive()
            after = _Prepared(stage.runnable(before.value))
            if stage.stream is not None:
                after.made = StreamEvent(stage.stream.device)
        if not self._filled[index]:
            self._filled[index] = True
            if stage.fill_callback is not None:
                stage.fill_callback()
        return after

    def _exhausted(self, index: int) -> None:
        if not self._ended[index]:
            self._ended[index] = True
            callback = self._stages[index].data_exhausted_callback
            if callback is not None:
                callback()

    @staticmethod
    def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
