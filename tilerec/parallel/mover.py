"""`Mover`: one move of a model's tables, after all ranks have agreed on it.

    hear facts ──► order and budget ──► per batch of tables: allocate, move, vote, switch ──► new exchanges and plans

A batch is as many tables as the memory allows, at least one. Its tables switch on all ranks or on none: every rank
votes after its part is done. What has switched stays; a model of which some tables have moved is under a mixed plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError, ReshardError
from tilerec.parallel.move_order import order_of
from tilerec.parallel.move_progress import MoveProgress, ProgressOption
from tilerec.parallel.plan_of import keep_plan, kept_plans
from tilerec.parallel.steppers import Steppers
from tilerec.parallel.table_move import Facts, TableMove
from tilerec.parallel.transit import Transit, directions, sent_by_rank
from tilerec.sharding.embedding import Exchange, ShardedCollection
from tilerec.sharding.layout import ShardedTable as TableLayout
from tilerec.sharding.retile import new_peers, places_of
from tilerec.sharding.table import ShardedTable
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ShardingPlan, Wire
from tilerec.spec.topology import Topology

LEAST_TRANSIT, MOST_TRANSIT, TRANSIT_PART = 1 << 20, 64 << 20, 4
"""Bytes of a rank's messages at a time, unless the budget is less: a quarter of the largest tile, within the two."""


@dataclass(frozen=True)
class Resharded:
    """What a move did; the same on every rank, but for `seconds`.

    Attributes:
        tables: names of those that have another tiling now (`'t' of module 'ebc'`).
        bytes_sent: by all ranks together. bytes_copied: within ranks.
        busiest_bytes: sent and received by the rank that sent and received the most.
        extra_bytes: the most that a rank held beyond the larger of what it had before and has now.
        seconds: on this rank, checks included.
    """

    tables: tuple[str, ...]
    bytes_sent: int
    bytes_copied: int
    busiest_bytes: int
    extra_bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.tables:
            return "nothing moved: every table is where the plan wants it"
        return (
            f"{len(self.tables)} tables moved: {_size(self.bytes_sent)} sent, {_size(self.bytes_copied)} copied, in "
            f"{self.seconds:.3f} s; at most {_size(self.extra_bytes)} beside the tables on any rank"
        )


class Ready(NamedTuple):
    """A move that can begin, as far as this rank knows."""

    plan: ShardingPlan
    present: ShardingPlan
    topology: Topology
    moves: list[TableMove]
    steppers: Steppers


class Mover:
    """One move.

    Args:
        group: the ranks over which the tables lie.
        voters: all who must agree that a batch has arrived: these, and those that hold copies elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        collections: dict[str, ShardedCollection],
        group: Group,
        voters: Group,
        ready: Ready,
        budget: int | None,
        progress: ProgressOption,
        begun: float,
    ) -> None:
        self._model, self._collections, self._group, self._voters = model, collections, group, voters
        self.moved: list[TableMove] = []
        self._ready, self._budget, self._begun = ready, budget, begun
        self.moves = ready.moves
        self.done = False
        self._option = progress

    def run(self) -> Resharded:
        ready = self._ready
        topology = next(iter(self._collections.values())).exchange.topology
        if not self.moves and ready.plan == ready.present and ready.topology is topology:
            self.done = True
            return self._report(0)
        self._hear()
        most, batches, extra = self._schedule()
        progress = self._progress()
        moved = self.moved
        try:
            for batch in batches:
                own = [self.moves[t] for t in batch]
                self._move(own, most, moved, progress)
                moved += own
            self.done = True
        finally:
            progress.close()
            self._settle(moved)
        return self._report(extra)

    # ------------------------------------------------------------------------------------------------------ before

    def _hear(self) -> None:
        """Everybody's facts about what is to move."""
        own: list[Facts | None] = []
        trouble = None
        try:
            own = [move.facts() for move in self.moves]
        except Exception as error:
            trouble = error
        texts = cast("list[str]", self._voters.all_gather_object(str(trouble or "")))
        if trouble is not None:
            raise trouble
        for rank, text in enumerate(texts):
            if text:
                raise ConfigError(f"Rank {rank}: {text}")
        said = cast("list[list[Facts | None]]", self._group.all_gather_object(own))
        for i, move in enumerate(self.moves):
            move.settle([facts[i] for facts in said])

    def _schedule(self) -> tuple[int, Sequence[Sequence[int]], int]:
        """(bytes of a message, batches, extra memory of a rank).

        Raises:
            ConfigError: the budget is less than a move needs.
        """
        loads, ranks = [move.load for move in self.moves], self._group.size
        before = [load.bytes_held(load.old, ranks) for load in loads]
        after = [load.bytes_held(load.new, ranks) for load in loads]
        peers = max(1, directions(loads))
        largest = max((max(own) for own in (*before, *after)), default=0)
        out, into, _ = sent_by_rank(loads, ranks)
        busiest = max((a + b for a, b in zip(out, into, strict=True)), default=0)
        transit = min(MOST_TRANSIT, max(LEAST_TRANSIT, largest // TRANSIT_PART), busiest)
        # Each message lies in a buffer of its own, and among those of all peers in the call.
        least = 2 * peers * max((load.row_bytes() for load in loads), default=0) if busiest else 0
        single = order_of(before, after, None).extra
        if self._budget is None:
            budget = max(single, largest) + max(transit, least)
        else:
            budget = self._budget
            if budget < single + least:
                raise ConfigError(
                    f"reshard: budget_bytes is {budget:,}, and a rank needs {single + least:,} beside its tables while "
                    f"they move from this plan to that one (a table's old and new tiles are both there until it has "
                    f"moved); give at least that, or plan for smaller tiles."
                )
        transit = max(least, min(transit, budget - single))
        order = order_of(before, after, budget - transit)
        return max(1, transit // (2 * peers)), self._by_device(order.batches), single + transit

    def _by_device(self, batches: Sequence[Sequence[int]]) -> list[list[int]]:
        """Batches of tables that are on one kind of device: what moves at once travels in one memory."""
        kinds = [move.table.weight.device.type for move in self.moves]
        split: list[list[int]] = []
        for batch in batches:
            for kind in sorted({kinds[t] for t in batch}):
                split.append([t for t in batch if kinds[t] == kind])
        return split

    def _progress(self) -> MoveProgress:
        me, loads = self._group.rank, [move.load for move in self.moves]
        out, into, _ = sent_by_rank(loads, self._group.size)
        self._own_bytes = out[me] + into[me]
        self._done_bytes = 0
        return MoveProgress(self._option, me, len(self.moves), self._own_bytes)

    # ---------------------------------------------------------------------------------------------------- one batch

    def _move(
        self, own: Sequence[TableMove], most: int, moved: Sequence[TableMove], progress: MoveProgress
    ) -> None:
        """Move some tables; all of them on all ranks, or none.

        Raises:
            ReshardError: a rank could not.
        """
        names = tuple(move.key for move in own)
        failure: Exception | None = None
        transit: Transit | None = None
        loads = [move.load for move in own]
        try:
            for move in own:
                move.allocate()
            transit = Transit(self._group, loads, most, own[0].table.weight.device)
        except Exception as error:
            failure = error
        try:
            rounds = self._vote(failure, "memory", names, moved, transit.rounds if transit is not None else 0)
            assert transit is not None
            out, into, _ = sent_by_rank(loads, self._group.size)
            size, begun = out[self._group.rank] + into[self._group.rank], self._done_bytes
            failure = transit.run(
                rounds, lambda k: progress.tell(len(moved), begun + size * k // rounds, names)
            )
            self._vote(failure, "the move", names, moved)
            self._done_bytes = begun + size
        except BaseException:
            for move in own:
                move.drop()
            raise
        for move in own:
            move.switch()

    def _vote(
        self,
        failure: Exception | None,
        what: str,
        names: Sequence[str],
        moved: Sequence[TableMove] = (),
        number: int = 0,
    ) -> int:
        """Return the largest of all ranks' numbers, if no rank has failed.

        Raises:
            ReshardError: one has; on every rank.
        """
        group = self._voters
        ones = [1] * group.size
        word = number if failure is None else -1
        mine = torch.full((group.size,), word, dtype=torch.int64, device=group.device)
        heard = group.all_to_all("reshard votes", torch.zeros_like(mine), mine, ones, ones).wait().tolist()
        if min(heard) >= 0:
            return int(max(heard))
        texts = cast("list[str]", group.all_gather_object("" if failure is None else _said(failure)))
        rank = heard.index(-1)
        where = f", on its way {', '.join(names[:4])}{' …' * (len(names) > 4)}" if names else ""
        done = [move.key for move in moved]
        kept = (
            f"{len(done)} tables have moved ({', '.join(done[:4])}{' …' * (len(done) > 4)}), the others are where they "
            "were; the model works under this mixed plan"
            if done
            else "nothing has moved, and the model works as before"
        )
        raise ReshardError(
            f"reshard: rank {rank} failed in {what}{where}: {texts[rank]}. {kept}. Put that right and reshard again."
        ) from failure

    # ------------------------------------------------------------------------------------------------------- after

    def _settle(self, moved: Sequence[TableMove]) -> None:
        """Exchanges, peers and plans for the tilings that tables have now."""
        ready = self._ready
        whole = len(moved) == len(self.moves)
        if whole:
            plan, topology = ready.plan, ready.topology
        else:
            plan, topology = _mixed(ready, moved), next(iter(self._collections.values())).exchange.topology
        for part in self._collections.values():
            for table in part._sharded_tables:
                places = places_of(table.tiling, self._group.rank)
                for rows, place in zip(table.tile_rows, places, strict=True):
                    rows.peers = new_peers(table, table.tiling, place, topology)
        for path, part in self._collections.items():
            part.exchange = _renewed(part.exchange, part, plan.plan[path], topology)
            part._renew_sinks()
        ready.steppers.refresh()
        keep_plans(self._model, plan)

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
    """The path of what is at `inner` below `path`."""
    return f"{path}.{inner}" if path and inner else path or inner


def _mixed(ready: Ready, moved: Sequence[TableMove]) -> ShardingPlan:
    """The present plan, with the tables that have moved as they are now."""
    plan = ready.present
    for move in moved:
        for path, name in move.names:
            plan = plan.replaced(path, name, ready.plan.plan[path][name])
    return plan


def _renewed(
    old: Exchange, part: ShardedCollection, plan: EmbeddingModuleShardingPlan, topology: Topology
) -> Exchange:
    """A collection's exchange for the tilings that its tables have now."""
    each = old.each_id or old.exact
    layouts = []
    for name, table in part._tables.items():
        sharding = plan[name]
        known = sharding.ids_per_bag
        fan_in = 1.0 if each else 2.0 if known is None else known
        layouts.append(TableLayout(name, cast(ShardedTable, table).tiling, fan_in, sharding.wire or Wire()))
    return old.over(topology, layouts)


def keep_plans(model: nn.Module, plan: ShardingPlan) -> None:
    """Every module below that keeps a plan keeps its part of this one."""
    for path, kept in list(kept_plans(model)):
        parts = {inner: plan.plan.get(joined(path, inner), tables) for inner, tables in kept.plan.items()}
        report = plan.report if path == "" else None
        holder = model.get_submodule(path)
        keep_plan(holder, ShardingPlan(parts, plan.world_size, plan.hosts, report=report))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error) or 'without a message'}"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError
