"""`Mover`: one move of a model's tables, after all ranks have agreed on the new plan.

    prepare   exchange facts ──► schedule
    run       per batch of tables: allocate ──► vote ──► move ──► vote ──► switch
              the last batch also switches exchanges and plans

A batch has as many tables as the memory allows, at least one. Its tables switch on all ranks or on none: all operations
that can fail come before the second vote, and after it there are assignments only. If a later batch fails, tables of
earlier batches keep their new tiles, and the model has a mixed plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, cast

from torch import nn
from torch.optim import Optimizer

from tilerec.comms.agreement import errors_of_ranks, on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import CommsError, ReshardError
from tilerec.parallel.resharding.chunked_transfer import ChunkedTransfer, sent_by_rank
from tilerec.parallel.resharding.end_state import EndState, end_state
from tilerec.parallel.resharding.external_optimizers import ExternalOptimizers
from tilerec.parallel.resharding.interrupts import Interrupts
from tilerec.parallel.resharding.move_progress import MoveProgress, ProgressOption
from tilerec.parallel.resharding.move_report import Resharded
from tilerec.parallel.resharding.move_schedule import schedule
from tilerec.parallel.resharding.table_move import TableFacts, TableMove
from tilerec.sharding.embedding import ShardedCollection
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology


class PreparedMove(NamedTuple):
    """A move that has passed the checks of this rank."""

    plan: ShardingPlan
    present: ShardingPlan
    topology: Topology
    moves: list[TableMove]
    steppers: ExternalOptimizers


class MoveOptions(NamedTuple):
    """Arguments of `reshard`, the time of its call, and the object that raises a deferred Ctrl-C."""

    budget: int | None
    progress: ProgressOption
    optimizers: Sequence[Optimizer] | None
    begun: float
    interrupts: Interrupts


class Mover:
    """One move.

    Args:
        group: the ranks over which the tables are sharded.
        voters: the ranks that vote on each batch: `group`, and the ranks of other sharding groups in 2D parallelism.
        earlier: tables that other moves of the same call have moved.
    """

    def __init__(
        self, model: nn.Module, collections: dict[str, ShardedCollection], group: Group, voters: Group,
        ready: PreparedMove, options: MoveOptions, earlier: Sequence[TableMove] = (),
    ) -> None:  # fmt: skip
        self._model, self._collections, self._group, self._voters = model, collections, group, voters
        self.moved: list[TableMove] = []
        self._follow_error: Exception | None = None
        self._ready, self._options, self._earlier = ready, options, earlier
        self.moves = ready.moves
        self.done = False

    def prepare(self) -> None:
        """Make the schedule with all ranks. Nothing moves yet.

        Raises:
            ConfigError: some state of a table cannot move, or the budget is less than the move needs.
        """
        ready, own = self._ready, list[TableFacts | None]()
        with on_all_ranks(self._voters, "reshard", "preparing the move"):
            own = [move.facts() for move in self.moves]
            self._options.interrupts.check()
        facts = cast("list[list[TableFacts | None]]", self._group.all_gather_object(own)) if self.moves else []
        with on_all_ranks(self._voters, "reshard", "preparing the move"):
            for i, move in enumerate(self.moves):
                move.settle([facts_of_rank[i] for facts_of_rank in facts])
            plan = schedule([move.load for move in self.moves], self._group.size, self._options.budget)
            self._most, self._extra = plan.most, plan.extra
            self._batches = self._by_device(plan.batches)
            self._progress = self._made_progress()
            topology = next(iter(self._collections.values())).exchange.topology
            self.done = not self.moves and ready.plan == ready.present and ready.topology is topology

    def run(self) -> Resharded:
        """Move all tables; call `prepare` first.

        Raises:
            ReshardError: a rank has failed.
        """
        if not self.done:
            batches: Sequence[Sequence[int]] = self._batches or [()]
            try:
                for i, batch in enumerate(batches):
                    self._move([self.moves[t] for t in batch], last=i == len(batches) - 1)
            except BaseException:
                if self.moved and not self.done:
                    ready, topology = self._ready, next(iter(self._collections.values())).exchange.topology
                    self._end(self._ending(_mixed(ready, self.moved), topology, self.moved))
                raise
            finally:
                self._progress.close()
        return self._report(self._extra)

    # ------------------------------------------------------------------------------------------------------ before

    def _by_device(self, batches: Sequence[Sequence[int]]) -> list[list[int]]:
        """Split batches by device type: the messages of a batch are in the memory of one device."""
        kinds = [move.table.home.type for move in self.moves]
        split: list[list[int]] = []
        for batch in batches:
            for kind in sorted({kinds[t] for t in batch}):
                split.append([t for t in batch if kinds[t] == kind])
        return split

    def _made_progress(self) -> MoveProgress:
        me, loads = self._group.rank, [move.load for move in self.moves]
        out, into, _ = sent_by_rank(loads, self._group.size)
        self._own_bytes = out[me] + into[me]
        self._done_bytes = 0
        return MoveProgress(self._options.progress, me, len(self.moves), self._own_bytes)

    # ---------------------------------------------------------------------------------------------------- one batch

    def _move(self, own: Sequence[TableMove], last: bool) -> None:
        """Move the tables of a batch: all of them on all ranks, or none.

        Args:
            last: also switch exchanges, peers and plans.

        Raises:
            ReshardError: a rank has failed.
        """
        names = tuple(move.key for move in own)
        transit: ChunkedTransfer | None = None
        ending: EndState | None = None
        failure: BaseException | None = None
        loads = [move.load for move in own]
        try:
            try:
                self._options.interrupts.check()
                for move in own:
                    move.allocate()
                if own:
                    transit = ChunkedTransfer(self._group, loads, self._most, own[0].table.home)
                out, into, _ = sent_by_rank(loads, self._group.size)
                size, begun = out[self._group.rank] + into[self._group.rank], self._done_bytes
            except BaseException as error:
                failure = error
            self._vote(failure, "allocation", names)
            # Groups of 2D parallelism may differ in rounds, and all of them report progress.
            own_rounds = 0 if transit is None else transit.rounds
            rounds = max(cast("list[int]", self._voters.all_gather_object(own_rounds)))

            def after_round(k: int) -> None:
                self._options.interrupts.check()
                self._progress.tell(len(self.moved), begun + size * k // rounds, names)

            failure = transit.run(rounds, after_round) if transit is not None else None
            for move in own:  # a failed rank takes part, too: peers wait for its messages
                try:
                    move.fill_head()
                except CommsError:  # a peer is gone
                    raise
                except Exception as error:
                    failure = failure or error
            if failure is None:
                try:
                    for move in own:
                        move.make_ready()
                    if last:
                        ready = self._ready
                        ending = self._ending(ready.plan, ready.topology, self.moves)
                    self._options.interrupts.check()
                except BaseException as error:
                    failure = error
            self._vote(failure, "the move", names)
        except BaseException:
            for move in own:
                move.drop()
            raise
        # All ranks switch now. Assignments only, so that no rank can fail here.
        self._done_bytes = begun + size
        for move in own:
            self._follow_error = move.switch() or self._follow_error
            self.moved.append(move)
        if ending is not None:
            self._end(ending)
            self.done = True
            self._vote(self._follow_error, "the update of optimizers and RowStates", ())

    def _vote(self, failure: BaseException | None, operation: str, names: Sequence[str]) -> None:
        """Return if no rank has failed. Collective.

        Args:
            failure: error of this rank.
            operation: the step on which ranks vote, for the error message.
            names: tables of the batch.

        Raises:
            ReshardError: a rank has failed; on every rank. A rank with a KeyboardInterrupt raises that instead.
        """
        errors = errors_of_ranks(self._voters, failure)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if not errors:
            return
        rank, text = next(iter(errors.items()))
        where = f", batch {', '.join(names[:4])}{' …' * (len(names) > 4)}" if names else ""
        done = [move.key for move in (*self._earlier, *self.moved)]
        some = f"{', '.join(done[:4])}{' …' * (len(done) > 4)}"
        kept = (
            "All tables have moved, but an optimizer or a RowState of that rank has not followed"
            if self.done
            else f"{len(done)} tables have moved ({some}), the others have not; the model works under this mixed plan"
            if done
            else "Nothing has moved, and the model works as before"
        )
        raise ReshardError(
            f"reshard: rank {rank} failed in {operation}{where}: {text}. {kept}. Fix the cause and reshard again."
        ) from failure

    # ------------------------------------------------------------------------------------------------------- after

    def _ending(self, plan: ShardingPlan, topology: Topology, moved: Sequence[TableMove]) -> EndState:
        return end_state(self._collections, self._group.rank, plan, topology, moved)

    def _end(self, ending: EndState) -> None:
        self._ready.steppers.refresh()
        ending.put_in_place(self._model, self._collections)

    def _report(self, extra: int) -> Resharded:
        loads = [move.load for move in self.moves]
        out, into, kept = sent_by_rank(loads, self._group.size)
        return Resharded(
            tuple(move.key for move in self.moves),
            sum(out) + sum(move.head_bytes() for move in self.moves),
            kept,
            max((a + b for a, b in zip(out, into, strict=True)), default=0),
            extra,
            time.monotonic() - self._options.begun,
        )


def _mixed(ready: PreparedMove, moved: Sequence[TableMove]) -> ShardingPlan:
    """Return the present plan with the new shardings of the tables that have moved."""
    plan = ready.present
    for move in moved:
        for path, name in move.names:
            plan = plan.replaced(path, name, ready.plan.plan[path][name])
    return plan
