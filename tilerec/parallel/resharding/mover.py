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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from tilerec.comms.agreement import error_text, on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ReshardError
from tilerec.parallel.plan_of import store_plan, stored_plans
from tilerec.parallel.resharding.chunked_transfer import ChunkedTransfer, sent_by_rank
from tilerec.parallel.resharding.external_optimizers import ExternalOptimizers
from tilerec.parallel.resharding.interrupts import Interrupts
from tilerec.parallel.resharding.move_progress import MoveProgress, ProgressOption
from tilerec.parallel.resharding.move_schedule import schedule
from tilerec.parallel.resharding.table_move import TableFacts, TableMove
from tilerec.sharding.embedding import Exchange, ShardedCollection
from tilerec.sharding.layout import TableLayout
from tilerec.sharding.retile import new_peers, tiles_or_empty
from tilerec.sharding.table import ShardedTable
from tilerec.sharding.update import UpdatePeers
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ShardingPlan, Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


@dataclass(frozen=True)
class Resharded:
    """Report of a move; equal on every rank except for `seconds`.

    Attributes:
        tables: names of the tables with a new tiling (`'t' of module 'ebc'`).
        bytes_sent: bytes sent by all ranks together.
        bytes_copied: bytes copied within ranks.
        busiest_bytes: largest sum of bytes sent and received by one rank.
        extra_bytes: largest bytes that a rank needed beyond max(its tables before the move, its tables after it).
        seconds: duration on this rank, checks included.
    """

    tables: tuple[str, ...]
    bytes_sent: int
    bytes_copied: int
    busiest_bytes: int
    extra_bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.tables:
            return "nothing moved: every table already has the tiling of the plan"
        moved = "1 table" if len(self.tables) == 1 else f"{len(self.tables)} tables"
        return (
            f"{moved} moved: {_size(self.bytes_sent)} sent, {_size(self.bytes_copied)} copied, in "
            f"{self.seconds:.3f} s; at most {_size(self.extra_bytes)} beside the tables on any rank"
        )


class PreparedMove(NamedTuple):
    """A move that has passed the checks of this rank."""

    plan: ShardingPlan
    present: ShardingPlan
    topology: Topology
    moves: list[TableMove]
    steppers: ExternalOptimizers


class EndState(NamedTuple):
    """Objects that tables, collections and modules get when a move ends: peers per tile, exchanges and plan."""

    peers: list[tuple[ShardedTable, list[UpdatePeers]]]
    exchanges: dict[str, Exchange]
    plan: ShardingPlan


class Mover:
    """One move.

    Args:
        group: the ranks over which the tables are sharded.
        voters: the ranks that vote on each batch: `group`, and the ranks of other sharding groups in 2D parallelism.
        interrupts: raises a deferred Ctrl-C.
        earlier: tables that other moves of the same call have moved.
    """

    def __init__(
        self,
        model: nn.Module,
        collections: dict[str, ShardedCollection],
        group: Group,
        voters: Group,
        ready: PreparedMove,
        budget: int | None,
        progress: ProgressOption,
        begun: float,
        interrupts: Interrupts,
        earlier: Sequence[TableMove] = (),
    ) -> None:
        self._model, self._collections, self._group, self._voters = model, collections, group, voters
        self.moved: list[TableMove] = []
        self._follow_error: Exception | None = None
        self._ready, self._budget, self._begun = ready, budget, begun
        self._interrupts, self._earlier = interrupts, earlier
        self.moves = ready.moves
        self.done = False
        self._option = progress

    def prepare(self) -> None:
        """Make the schedule with all ranks. Nothing moves yet.

        Raises:
            ConfigError: some state of a table cannot move, or the budget is less than the move needs.
        """
        ready, own = self._ready, list[TableFacts | None]()
        with on_all_ranks(self._voters, "reshard", "preparing the move"):
            own = [move.facts() for move in self.moves]
            self._interrupts.check()
        facts = (
            cast("list[list[TableFacts | None]]", self._group.all_gather_object(own)) if self.moves else []
        )
        with on_all_ranks(self._voters, "reshard", "preparing the move"):
            for i, move in enumerate(self.moves):
                move.settle([facts_of_rank[i] for facts_of_rank in facts])
            plan = schedule([move.load for move in self.moves], self._group.size, self._budget)
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
        kinds = [move.table.weight.device.type for move in self.moves]
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
        return MoveProgress(self._option, me, len(self.moves), self._own_bytes)

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
                self._interrupts.check()
                for move in own:
                    move.allocate()
                if own:
                    transit = ChunkedTransfer(self._group, loads, self._most, own[0].table.weight.device)
                out, into, _ = sent_by_rank(loads, self._group.size)
                size, begun = out[self._group.rank] + into[self._group.rank], self._done_bytes
            except BaseException as error:
                failure = error
            rounds = self._vote(failure, "allocation", names, transit.rounds if transit is not None else 0)

            def after_round(k: int) -> None:
                self._interrupts.check()
                self._progress.tell(len(self.moved), begun + size * k // rounds, names)

            failure = transit.run(rounds, after_round) if transit is not None else None
            if failure is None:
                try:
                    for move in own:
                        move.make_ready()
                    if last:
                        ready = self._ready
                        ending = self._ending(ready.plan, ready.topology, self.moves)
                    self._interrupts.check()
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

    def _vote(
        self,
        failure: BaseException | None,
        operation: str,
        names: Sequence[str],
        number: int = 0,
    ) -> int:
        """Return the largest of all ranks' numbers if no rank has failed. Collective.

        Args:
            failure: error of this rank.
            operation: the step on which ranks vote, for the error message.
            names: tables of the batch.

        Raises:
            ReshardError: a rank has failed; on every rank. A rank with a KeyboardInterrupt raises that instead.
        """
        group = self._voters
        ones = [1] * group.size
        vote = number if failure is None else -1
        sent = torch.full((group.size,), vote, dtype=torch.int64, device=group.device)
        votes = group.all_to_all("reshard votes", torch.zeros_like(sent), sent, ones, ones).wait().tolist()
        if min(votes) >= 0:
            return int(max(votes))
        texts = cast("list[str]", group.all_gather_object("" if failure is None else error_text(failure)))
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        rank = votes.index(-1)
        where = f", batch {', '.join(names[:4])}{' …' * (len(names) > 4)}" if names else ""
        done = [move.key for move in (*self._earlier, *self.moved)]
        some = f"{', '.join(done[:4])}{' …' * (len(done) > 4)}"
        kept = (
            "All tables have moved, but an optimizer or a RowState of that rank has not followed"
            if self.done
            else f"{len(done)} tables have moved ({some}), the others have not; the model "
            "works under this mixed plan"
            if done
            else "Nothing has moved, and the model works as before"
        )
        raise ReshardError(
            f"reshard: rank {rank} failed in {operation}{where}: {texts[rank]}. {kept}. Fix the cause and reshard "
            "again."
        ) from failure

    # ------------------------------------------------------------------------------------------------------- after

    def _ending(self, plan: ShardingPlan, topology: Topology, moved: Sequence[TableMove]) -> EndState:
        """Return the peers and exchanges for a plan, given the tables that have moved or are about to."""
        me = self._group.rank
        new = {name: move.new for move in moved for name in move.names}
        peers: list[tuple[ShardedTable, list[UpdatePeers]]] = []
        exchanges: dict[str, Exchange] = {}
        for path, part in self._collections.items():
            tilings = {name: new.get((path, name), table.tiling) for name, table in _tables(part).items()}
            for name, table in _tables(part).items():
                places = tiles_or_empty(tilings[name], me)
                peers.append((table, [new_peers(table, tilings[name], place, topology) for place in places]))
            exchanges[path] = _renewed(part.exchange, tilings, plan.plan[path], topology)
        return EndState(peers, exchanges, plan)

    def _end(self, ending: EndState) -> None:
        """Replace exchanges, peers and plans by those for the new tilings."""
        for table, peers in ending.peers:
            for rows, own in zip(table.tile_rows, peers, strict=True):
                rows.peers = own
        for path, part in self._collections.items():
            part.exchange = ending.exchanges[path]
            part.exchange.enter()
            part._renew_sinks()
        self._ready.steppers.refresh()
        keep_plans(self._model, ending.plan)

    def _report(self, extra: int) -> Resharded:
        loads = [move.load for move in self.moves]
        out, into, kept = sent_by_rank(loads, self._group.size)
        return Resharded(
            tuple(move.key for move in self.moves),
            sum(out),
            kept,
            max((a + b for a, b in zip(out, into, strict=True)), default=0),
            extra,
            time.monotonic() - self._begun,
        )


def joined(path: str, inner: str) -> str:
    """Return the module path of `inner` below `path`."""
    return f"{path}.{inner}" if path and inner else path or inner


def _mixed(ready: PreparedMove, moved: Sequence[TableMove]) -> ShardingPlan:
    """Return the present plan with the new shardings of the tables that have moved."""
    plan = ready.present
    for move in moved:
        for path, name in move.names:
            plan = plan.replaced(path, name, ready.plan.plan[path][name])
    return plan


def _tables(part: ShardedCollection) -> dict[str, ShardedTable]:
    return cast("dict[str, ShardedTable]", part._tables)


def _renewed(
    old: Exchange, tilings: Mapping[str, Tiling], plan: EmbeddingModuleShardingPlan, topology: Topology
) -> Exchange:
    """Return a collection's exchange for new tilings of its tables."""
    each = old.each_id or old.exact
    layouts = []
    for name, tiling in tilings.items():
        sharding = plan[name]
        known = sharding.ids_per_bag
        fan_in = 1.0 if each else 2.0 if known is None else known
        layouts.append(TableLayout(name, tiling, fan_in, sharding.wire or Wire()))
    return old.over(topology, layouts)


def keep_plans(model: nn.Module, plan: ShardingPlan) -> None:
    """Store a new plan in the model and in every submodule that keeps a part of the old plan."""
    for path, kept in list(stored_plans(model)):
        parts = {inner: plan.plan.get(joined(path, inner), tables) for inner, tables in kept.plan.items()}
        report = plan.report if path == "" else None
        holder = model.get_submodule(path)
        # A plan over sharding groups of several sizes has no world size.
        size = None if kept.world_size is None else plan.world_size
        store_plan(holder, ShardingPlan(parts, size, kept.hosts and plan.hosts, report=report))


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError
