"""`reshard`: a running model's tables get other tilings, in place, between two steps.

    read the plan ──► all ranks agree ──► per batch of tables: allocate, move, vote, switch ──► new exchanges

A batch is as many tables as the memory allows, at least one. Its tables switch on all ranks or on none: every rank
votes after its part is done. What has switched stays; a model of which some tables have moved is under a mixed plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from tilerec.comms.agree import agree
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, ReshardError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.cuts import without_cuts
from tilerec.parallel.hosts import topology_of
from tilerec.parallel.kernels import gifts_of, with_kernels
from tilerec.parallel.move_order import order_of
from tilerec.parallel.move_progress import MoveProgress, ProgressOption, check_progress
from tilerec.parallel.plan_of import keep_plan, kept_plans
from tilerec.parallel.read_plan import AnyPlan, completed, read_plan
from tilerec.parallel.shard import _check_ties
from tilerec.parallel.steppers import Steppers
from tilerec.parallel.table_move import Facts, TableMove, table_word
from tilerec.parallel.tables import Name, sizes_of, ties_of
from tilerec.parallel.transit import Transit, directions, sent_by_rank
from tilerec.sharding.embedding import Exchange, ShardedCollection
from tilerec.sharding.layout import ShardedTable as TableLayout
from tilerec.sharding.retile import new_peers, places_of
from tilerec.sharding.table import ShardedTable, check_rule
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

LEAST_TRANSIT, MOST_TRANSIT = 64 << 10, 16 << 20
"""Bytes of a rank's messages at a time, unless the budget is less: an eighth of the largest tile, within these."""

_PLAN = "the plan to reshard to"


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


def reshard(
    model: nn.Module,
    plan: AnyPlan,
    *,
    budget_bytes: int | None = None,
    progress: ProgressOption = None,
    optimizers: Sequence[Optimizer] | None = None,
) -> Resharded:
    """Give the tables of a sharded model the tilings of a plan, in place; every rank calls it, between two steps.

    Weights, every optimizer slot and count, and gradients that are there move. Training goes on with the bits that it
    would have if the plan had been in use from this state on. Modules, configs, names, hooks, the first leaf of every
    table, `fused_optimizer` handles, schedulers and the dense part stay the objects they are; further leaves
    (`weight.1` …) come and go.

    Args:
        model: what was given to `shard` or `DistributedModelParallel` (or the latter itself).
        plan: in any form that `shard` takes. Tables that it does not name stay where they are; wires and kernels that
            it does not name stay what they are.
        budget_bytes: memory that a rank may need beyond the larger of what its tables take before and after: new tiles
            beside old ones, and messages. None: what the largest move of a single table needs (at most one tile of
            each rank, where tables are alike), and messages of at most 16 MiB in all.
        progress: None shows a bar on rank 0 when it takes long, on a terminal; True always, False never; or a function
            that is called with a `Moving` on every rank.
        optimizers: those that step tables without an attached optimizer, in one order on every rank. None: those of
            this process that hold tiles of these tables.

    Raises:
        ConfigError: before anything moves, on every rank: the model is not sharded; the plan is for another world,
            names tables that the model lacks, has other sizes, differs between ranks, cuts tied tables in two ways or
            does not go with an attached optimizer; the budget is too small; an optimizer keeps state that cannot move.
        ReshardError: midway, on every rank: a rank could not do its part. The tables that have moved stay where they
            are now, all others stay where they were, and the model works under this mixed plan (`plan_of(model)`).
        CommsError: a rank is gone.
    """
    begun = time.monotonic()
    model = getattr(model, "module") if hasattr(model, "_dmp_wrapped_module") else model  # noqa: B009
    collections = sharded_collections(model, "reshard")
    group = next(iter(collections.values())).exchange.group
    try:
        ready = _prepare(model, collections, plan, group, budget_bytes, progress, optimizers)
    except Exception as error:
        # The others must not wait for this rank: they hear of it where they compare.
        with suppress(ConfigError):
            agree(group, _PLAN, {"checks": str(error)})
        raise
    agree(
        group,
        _PLAN,
        {
            "checks": "passed",
            "plan": ready.plan.to_json(),
            "present plan": ready.present.to_json(),
            "given budget_bytes": budget_bytes,
            "found optimizers": ready.steppers.described(),
        },
    )
    return _Mover(model, collections, group, ready, budget_bytes, progress, begun).run()


class Ready(NamedTuple):
    """A move that can begin, as far as this rank knows."""

    plan: ShardingPlan
    present: ShardingPlan
    topology: Topology
    moves: list[TableMove]
    steppers: Steppers


def sharded_collections(model: nn.Module, who: str) -> dict[str, ShardedCollection]:
    """The sharded collections of a model, by path; all over the same ranks.

    Raises:
        ConfigError: there are none, or they lie on different ranks.
    """
    found = {path: part for path, part in model.named_modules() if isinstance(part, ShardedCollection)}
    if not found:
        raise ConfigError(
            f"{who}: {type(model).__name__} has no sharded tables; shard it first (tilerec.shard, "
            "DistributedModelParallel)."
        )
    sizes = {path: part.exchange.group.size for path, part in found.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"{who}: the collections of {type(model).__name__} lie on groups of different sizes ({sizes}); pass the "
            "parts that share a group one by one."
        )
    return found


def present_plan(model: nn.Module, collections: Mapping[str, ShardedCollection], who: str) -> ShardingPlan:
    """The plan that a model's collections are under.

    Raises:
        ConfigError: it was kept at a module outside.
    """
    known: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, plan in kept_plans(model):
        for inner, tables in plan.plan.items():
            known.setdefault(_joined(path, inner), EmbeddingModuleShardingPlan(tables))
    missing = [path for path in collections if path not in known]
    if missing:
        raise ConfigError(
            f"{who}: module '{missing[0]}' of this {type(model).__name__} was sharded as a part of another module; "
            "pass the module that was given to shard() or to DistributedModelParallel, so that its plan stays true."
        )
    topology = next(iter(collections.values())).exchange.topology
    return ShardingPlan({path: known[path] for path in collections}, topology.world_size, topology.host_ranks)


def _joined(path: str, inner: str) -> str:
    return f"{path}.{inner}" if path and inner else path or inner


def _prepare(
    model: nn.Module,
    collections: dict[str, ShardedCollection],
    plan: AnyPlan,
    group: Group,
    budget: int | None,
    progress: ProgressOption,
    optimizers: Sequence[Optimizer] | None,
) -> Ready:
    """All checks that need no other rank."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ConfigError(
            f"reshard: budget_bytes is {budget!r}; wanted a whole number of bytes from 1, or None."
        )
    check_progress(progress)
    present = present_plan(model, collections, "reshard")
    whole, topology = _planned(present, collections, plan, group)
    ties = ties_of(cast("dict[str, TableCollection]", collections))
    tilings = {(path, name): cast(Tiling, s.tiling) for path, name, s in whole.tables()}
    _check_ties(ties, tilings)
    gifts_of(whole, cast("dict[str, TableCollection]", collections), ties, [])
    moving: list[tuple[list[Name], ShardedTable, Tiling]] = []
    for names in ties:
        table = cast(ShardedTable, next(iter(names.values())))
        for place in names:
            check_rule(table, tilings[place])
        new = tilings[next(iter(names))]
        if new != table.tiling:
            moving.append((list(names), table, new))
    for path, part in collections.items():
        for name, sharding in whole.plan[path].items():
            if part.exchange.exact and sharding.wire != Wire():
                raise ConfigError(
                    f"reshard: table {table_word((path, name))} is to have the wire {sharding.wire}, which rounds, and "
                    "the model was sharded with exact=True; leave the wire out of the plan."
                )
    stepped = {table_word(names[0]): table for names, table, _ in moving if table.rows.spec is None}
    steppers = Steppers(stepped, optimizers)
    moves = [TableMove(names, table, new, topology, steppers) for names, table, new in moving]
    return Ready(whole, present, topology, moves, steppers)


def _planned(
    present: ShardingPlan, collections: Mapping[str, ShardedCollection], plan: AnyPlan, group: Group
) -> tuple[ShardingPlan, Topology]:
    """The plan as a whole one, and the topology it is for."""
    own = cast("Mapping[str, TableCollection]", collections)
    now = next(iter(collections.values())).exchange.topology
    kind = next(iter(collections.values())).device.type

    def world(hosts: Sequence[Sequence[int]] | None) -> Topology:
        if hosts is None or [sorted(h) for h in hosts] == [sorted(h) for h in now.host_ranks]:
            return now
        return topology_of(group, None, hosts, kind)

    given = read_plan(without_cuts(plan, own, world), own)
    if given.world_size not in (None, group.size):
        given.check({}, group.size)  # before its hosts are read, which are another world's
    topology = world(given.hosts)
    given = completed(given, own, topology)
    paths = dict.fromkeys([*present.plan, *given.plan])
    ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan({**present.plan.get(path, {}), **given.plan.get(path, {})})
            for path in paths
        }
    ).check(sizes_of(own), group.size)
    said = {(path, name): sharding for path, name, sharding in given.tables()}
    for names in ties_of(own):
        spoken = [said[name] for name in names if name in said]
        for name in names:  # one of the names speaks for all
            if spoken and name not in said:
                said[name] = spoken[0]
    parts = {
        path: EmbeddingModuleShardingPlan(
            {name: _filled(said.get((path, name)), present.plan[path][name]) for name in part._tables}
        )
        for path, part in collections.items()
    }
    whole = ShardingPlan(parts, group.size, topology.host_ranks, report=given.report)
    return with_kernels(whole, own), topology


def _filled(said: ParameterSharding | None, now: ParameterSharding) -> ParameterSharding:
    """What a plan says of a table; where it says nothing, what is."""
    if said is None:
        return now
    return replace(
        said,
        compute_kernel=said.kernel or now.kernel,
        wire=said.wire or now.wire,
        ids_per_bag=now.ids_per_bag if said.ids_per_bag is None else said.ids_per_bag,
        data_type=now.data_type,
    )


class _Mover:
    """One call of `reshard`, after the ranks have agreed."""

    def __init__(
        self,
        model: nn.Module,
        collections: dict[str, ShardedCollection],
        group: Group,
        ready: Ready,
        budget: int | None,
        progress: ProgressOption,
        begun: float,
    ) -> None:
        self._model, self._collections, self._group = model, collections, group
        self._ready, self._budget, self._begun = ready, budget, begun
        self._moves = ready.moves
        self._option = progress

    def run(self) -> Resharded:
        ready = self._ready
        topology = next(iter(self._collections.values())).exchange.topology
        if not self._moves and ready.plan == ready.present and ready.topology is topology:
            return self._report(0)
        self._hear()
        most, batches, extra = self._schedule()
        progress = self._progress()
        moved: list[TableMove] = []
        try:
            for batch in batches:
                own = [self._moves[t] for t in batch]
                self._move(own, most, moved, progress)
                moved += own
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
            own = [move.facts() for move in self._moves]
        except Exception as error:
            trouble = error
        said = cast(
            "list[tuple[str, list[Facts | None]]]",
            self._group.all_gather_object((str(trouble or ""), own)),
        )
        if trouble is not None:
            raise trouble
        for rank, (text, _) in enumerate(said):
            if text:
                raise ConfigError(f"Rank {rank}: {text}")
        for i, move in enumerate(self._moves):
            move.settle([facts[i] for _, facts in said])

    def _schedule(self) -> tuple[int, Sequence[Sequence[int]], int]:
        """(bytes of a message, batches, extra memory of a rank).

        Raises:
            ConfigError: the budget is less than a move needs.
        """
        loads, ranks = [move.load for move in self._moves], self._group.size
        before = [load.bytes_held(load.old, ranks) for load in loads]
        after = [load.bytes_held(load.new, ranks) for load in loads]
        peers = max(1, directions(loads))
        largest = max((max(own) for own in (*before, *after)), default=0)
        out, into, _ = sent_by_rank(loads, ranks)
        busiest = max((a + b for a, b in zip(out, into, strict=True)), default=0)
        transit = min(MOST_TRANSIT, max(LEAST_TRANSIT, largest // 8), busiest)
        least = peers * max((load.row_bytes() for load in loads), default=0) if busiest else 0
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
        return max(1, transit // peers), order.batches, single + transit

    def _progress(self) -> MoveProgress:
        me, loads = self._group.rank, [move.load for move in self._moves]
        out, into, _ = sent_by_rank(loads, self._group.size)
        self._own_bytes = out[me] + into[me]
        self._done_bytes = 0
        return MoveProgress(self._option, me, len(self._moves), self._own_bytes)

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
            transit = Transit(self._group, loads, most)
        except Exception as error:
            failure = error
        try:
            self._vote(failure, "memory", names, moved)
            assert transit is not None
            out, into, _ = sent_by_rank(loads, self._group.size)
            size, begun = out[self._group.rank] + into[self._group.rank], self._done_bytes
            rounds = max(1, transit.rounds)
            failure = transit.run(lambda k: progress.tell(len(moved), begun + size * k // rounds, names))
            self._vote(failure, "the move", names, moved)
            self._done_bytes = begun + size
        except BaseException:
            for move in own:
                move.drop()
            raise
        for move in own:
            move.switch()

    def _vote(
        self, failure: Exception | None, what: str, names: Sequence[str], moved: Sequence[TableMove] = ()
    ) -> None:
        """Return if no rank has failed.

        Raises:
            ReshardError: one has; on every rank.
        """
        group = self._group
        ones = [1] * group.size
        mine = torch.full((group.size,), int(failure is not None), dtype=torch.int64, device=group.device)
        heard = group.all_to_all("reshard votes", torch.zeros_like(mine), mine, ones, ones).wait().tolist()
        if not any(heard):
            return
        texts = cast("list[str]", group.all_gather_object("" if failure is None else _said(failure)))
        rank = heard.index(1)
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
        whole = len(moved) == len(self._moves)
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
        loads = [move.load for move in self._moves]
        out, into, kept = sent_by_rank(loads, self._group.size)
        return Resharded(
            tuple(move.key for move in self._moves),
            sum(out),
            kept,
            max((a + b for a, b in zip(out, into, strict=True)), default=0),
            extra,
            time.monotonic() - self._begun,
        )


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
        parts = {
            inner: plan.plan[_joined(path, inner)] for inner in kept.plan if _joined(path, inner) in plan.plan
        }
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
