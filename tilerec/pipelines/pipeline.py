"""`Pipeline`: runs named stages on the batches of an iterator, some of them ahead of the batch that trains.

    stage          finish_route  forward  read copy route  backward update
    ahead          1             0        2    2    2      0        0

In one call of `progress`, a stage with `ahead` = a runs for every batch in flight up to the a-th after the one whose
turn it is, once per batch. So the sizes and the ids of the next batches travel while this one computes. All
collectives are called from this thread, in the order of the list, which is the same on all ranks.

A batch is released after its forward. If the forward is one of the stages before reading, one batch less is alive.

An error in a stage that runs ahead is raised at its batch's turn, after all batches before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from tilerec.comms.group import Group
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.pipelines.batch_in_flight import BatchInFlight, Origin
from tilerec.pipelines.even_ranks import EvenRanks
from tilerec.pipelines.passes import Pass, Passes
from tilerec.pipelines.stage_times import StageTimes
from tilerec.pipelines.trace import Trace
from tilerec.sharding.embedding import ShardedCollection


@dataclass(frozen=True)
class Stage:
    """One named part of a step.

    Attributes:
        name: shown in traces.
        run: called once per batch, with the batch and its pass.
        ahead: number of batches by which the stage is ahead of the batch that trains.
    """

    name: str
    run: Callable[[BatchInFlight, Pass], None]
    ahead: int = 0


@final
class Pipeline:
    """The batches in flight of all iterators, and the stages that run on them.

    Args:
        early, late: in the order in which one call of `progress` runs them, before and after it reads.
        depth: number of batches in flight, the one that trains included.
        even: see `EvenRanks`; None: ranks do not exchange numbers of samples.
        who: the pipeline, in errors.
    """

    def __init__(
        self, early: Sequence[Stage], late: Sequence[Stage], depth: int, even: EvenRanks | None, who: str
    ) -> None:
        self._early, self._late, self.depth, self._even = tuple(early), tuple(late), depth, even
        self._passes = Passes(who)
        self._who = who
        self.trace: Trace | None = None
        self.times = StageTimes()
        self.last_origin: Origin | None = None
        self.stage = ""  # that runs, or has run last

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order of one call."""
        return self._early + self._late

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Run one step on the next batch of an iterator, and return its output.

        Raises:
            StopIteration: once, after the last batch. The same object may be passed again: a new pass begins.
        """
        current = self._passes.of(iterator, self._even)
        turn: BatchInFlight | None = None
        try:
            if self._early and not current.batches:  # the first call of a pass: nothing was read by the call before
                self._read(current, iterator, self.depth - 1)
                for stage in self._late:
                    self._run_ahead(stage, current, turn)
            for stage in self._early:
                turn = self._run(stage, current, turn)
            self._read(current, iterator, self.depth - (turn is not None))
            for stage in self._late:
                turn = self._run(stage, current, turn)
        except BaseException:
            current.held.clear()
            if current.over:
                self._passes.end(iterator)
            raise
        assert turn is not None, "some stages are not ahead"
        self.last_origin = turn.origin
        return turn.output

    def _read(self, current: Pass, iterator: Iterator[Any], waiting: int) -> None:
        """Read until `waiting` batches wait for their turn, or to the end."""
        self.stage = "read"
        with self._span("read", None):
            while len(current.batches) < waiting and not current.closed:
                current.read(iterator)

    def _run(self, stage: Stage, current: Pass, turn: BatchInFlight | None) -> BatchInFlight | None:
        """Run a stage for the batch whose turn it is, or for those ahead of it; return the first one if it is known."""
        if stage.ahead:
            self._run_ahead(stage, current, turn)
            return turn
        if turn is None:
            turn = current.take()
            turn.check_unwritten(self._who)
        self.stage = stage.name
        with self._span(stage.name, turn.origin):
            stage.run(turn, current)
        return turn

    def _run_ahead(self, stage: Stage, current: Pass, turn: BatchInFlight | None) -> None:
        """Run a stage once for each batch up to `stage.ahead` after the one whose turn it is; none if it is 0."""
        for batch in list(current.batches)[: stage.ahead + (turn is None)] if stage.ahead else ():
            if stage.name in batch.done:
                continue
            batch.done.add(stage.name)
            self.stage = stage.name
            with self._span(stage.name, batch.origin):
                try:
                    stage.run(batch, current)
                except Exception as error:  # raised at the batch's turn
                    batch.error = batch.error or error

    def run_again(self, names: set[str]) -> None:
        """Run these stages again for all batches in flight: there is more to do for them."""
        for batch in self._passes.in_flight():
            batch.done -= names

    def reset(self) -> None:
        """Drop all batches in flight. All ranks call it."""
        self._passes.clear()

    def _span(self, name: str, origin: Origin | None) -> contextlib.AbstractContextManager[None]:
        return self.times.span(name) if self.trace is None else self._traced(name, origin, self.trace)

    @contextlib.contextmanager
    def _traced(self, name: str, origin: Origin | None, trace: Trace) -> Iterator[None]:
        with trace.span(name, origin), self.times.span(name):
            yield


def group_of(model: nn.Module) -> Group | None:
    """Return the ranks that train a model together; None if it has no sharded tables, or the ranks are unknown."""
    collection: ShardedCollection | None = None
    for module in model.modules():
        if isinstance(module, DistributedModelParallel):
            return module.group
        if collection is None and isinstance(module, ShardedCollection):
            collection = module
    # With replica groups apart, a collection knows its own sharding group only.
    if collection is None or (collection.exchange.teams is not None and collection.exchange.teams.apart):
        return None
    return collection.exchange.group
