"""Builds the report of a decision: times and bytes of each table and each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tilerec.planner.cost.head_bytes import bytes_saved
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.workload import TableWork, Workload
from tilerec.planner.decision import Decision
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.table_entry import TableEntry
from tilerec.planner.search.instance import PER_MILLE, PICO, Instance, Ints, parts_of, portion
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.tile import rectangles

VERSION = 1
PRICED_PINS = 256
"""With at most this many pinned tables, the report has seconds of each of them; with more, only of their sum."""


def build_report(decision: Decision, plan: ShardingPlan) -> PlanReport:
    """Return the report of a found plan.

    Args:
        plan: the result of `decision.plan()`.
    """
    priced = decision.priced
    assert priced is not None
    request = decision.request
    free = {work.name: t for t, work in enumerate(decision.problem.tables)}
    owner, home, held = _times_and_bytes(decision)
    owners, homes = owner.tolist(), home.tolist()
    works = {w.name: w for w in request.works() if w.name in decision.pins} if decision.pins else {}
    entries = []
    for table in request.tables:
        path, name = table.names[0]
        sharding = plan.plan[path][name]
        assert sharding.tiling is not None
        if table.key in free:
            t = free[table.key]
            option = decision.problem.option_text(t, decision.option(t))
            size, own, at_home = int(held[t]), tuple(owners[t]), tuple(homes[t])
        else:
            option = "rows by memory" if table.key in decision.by_caps else "pinned"
            size, own = _pinned(decision, works[table.key], sharding)
            at_home = (0,) * len(own)
        entries.append(
            TableEntry(
                path, name, table.rows, table.dim, table.data_type.value.lower(), size, sharding.kind.value, option,
                sharding.tiling, own, at_home,
            )
        )  # fmt: skip
    notes = []
    reserved = request.reserved_bytes()
    if max(reserved):
        some = bytes_text(min(reserved))
        if len(set(reserved)) > 1:
            some += f" to {bytes_text(max(reserved))}"
        notes.append(f"memory includes {some} per rank that are reserved for other uses")
    if len(decision.pins) > PRICED_PINS:
        notes.append(f"seconds of single tables are left out for the {len(decision.pins)} pinned tables")
    behind = 0
    if any(option.cached for option in decision.problem.options):
        behind = sum(decision.problem.options[decision.option(t)].cached for t in range(len(free)))
    if behind:
        notes.append(
            f"{behind} of {len(request.tables)} tables have their rows in host memory, behind a cache on their "
            "rank's device; cache misses are priced with the topology's hbm_to_ddr_mem_bw"
        )
    notes += _hot_rows(decision)
    return PlanReport(
        cost_ps=priced.cost_ps,
        bound_ps=decision.bound,
        stages=priced.stage_names,
        load_ps=priced.load_ps,
        charge_ps=priced.charge_ps,
        memory=priced.memory,
        cap=priced.cap,
        tables=tuple(entries),
        topology=request.topology,
        batch_size=request.batch_size,
        planner=f"tilerec planner {VERSION}",
        notes=tuple(notes),
        network_ps=priced.network_ps,
        request=request,
    )


def _hot_rows(decision: Decision) -> list[str]:
    """Return a note on the tables whose hot rows every rank holds; [] without such tables."""
    assert decision.priced is not None
    shardings = decision.priced.shardings
    if not any(sharding.hot for sharding in shardings.values()):
        return []
    works = [work for work in decision.request.works() if shardings[work.name].hot]
    tilings = [tiling for work in works if (tiling := shardings[work.name].tiling) is not None]
    rows = sum(len(tiling.head.hot) for tiling in tilings if tiling.head is not None)
    saved = bytes_saved(works, tilings, decision.request.topology)
    change = f"{bytes_text(round(abs(saved)))} {'less' if saved >= 0 else 'more'}"
    return [
        f"{len(works)} of {len(decision.request.tables)} tables have {rows:,} hot rows on every rank: with "
        f"them a rank sends {change} in a step"
    ]


def _times_and_bytes(decision: Decision) -> tuple[Ints, Ints, Ints]:
    """Return [T, S] ps on the rank with most of a table, [T, S] ps on every rank, and [T] bytes on all ranks."""
    instance = decision.problem.instance
    every = np.arange(instance.tables)
    option = decision.solution.option[decision.row] if instance.tables else np.zeros(0, np.int64)
    owner = instance.cost[every, option] * _slowest(decision, option) // PER_MILLE
    width, pieces = instance.width[every, option], instance.pieces[every, option]
    held = instance.memory[every, option].sum(1) * width * pieces
    held = held + instance.home_memory[every, option].sum(1) * instance.ranks
    shared = np.flatnonzero(instance.shared)
    uneven = {t for t in every.tolist() if decision.shares(t) is not None} if decision.solution.rows else set()
    for t in np.flatnonzero(pieces > 1).tolist():
        places = decision.places(t)
        if t in uneven:
            continue
        if width[t] == 1 and len(shared):
            owner[t] = _ps_of_single_rank_pieces(instance, owner[t], places)
        elif len(set(places)) < len(places):
            owner[t] *= max(places.count(p) for p in set(places))
    # The ranks of a host share its link, so each of them gets its part of the time on the link.
    single = np.flatnonzero((width == 1) & (pieces == 1))
    single = single[[t not in uneven for t in single.tolist()]]
    if len(shared) and len(single) and instance.ranks > 1:
        where = np.array([decision.places(t)[0] for t in single.tolist()], np.int64)
        owner[np.ix_(single, shared)] //= instance.host_sizes[instance.host_of[where]][:, None]
    for t in uneven:
        where = parts_of(instance, t, int(option[t]), decision.places(t))
        shares = decision.shares(t)
        assert shares is not None
        owner[t] = _ps_of_uneven_rows(instance, owner[t], where, shares)
    # The mean over ranks, as hosts of different sizes have different parts.
    home = instance.home[every, option] * (instance.reach.sum(0) // instance.ranks) // PER_MILLE
    return owner[:, instance.first], home[:, instance.first], held


def _slowest(decision: Decision, option: Ints) -> Ints:
    """Return [T, S] slowness in per mille of the slowest rank that holds each table; [1, S] if all ranks are alike."""
    instance = decision.problem.instance
    if instance.even:
        return np.full((1, instance.stages), PER_MILLE)
    found = np.broadcast_to(instance.slow.max(0), (instance.tables, instance.stages)).copy()
    for t, o in enumerate(option.tolist()):
        places = decision.places(t)
        if places:
            ranks = list(places) if instance.width[t, o] == 1 else [r for h in places for r in instance.host_ranks[h]]
            found[t] = instance.slow[ranks].max(0)
    return found


def _ps_of_single_rank_pieces(instance: Instance, piece: Ints, places: Sequence[int]) -> Ints:
    """Return [S] ps of single-rank pieces on the rank with most of them; on shared links, the rank's part."""
    on_rank = Counter(places)
    found: Ints = piece * max(on_rank.values())
    if instance.shared.any():
        hosts = instance.host_of[list(places)]
        part = np.bincount(hosts, minlength=instance.hosts) / instance.host_sizes
        found[instance.shared] = (piece[instance.shared] * part.max()).astype(np.int64)
    return found


def _ps_of_uneven_rows(instance: Instance, piece: Ints, where: Ints, shares: Ints) -> Ints:
    """Return [S] ps of uneven pieces on ranks `where`, on the rank with most of them (on links, its part)."""
    parts = portion(piece * len(shares), shares)
    ranks, place = np.unique(where, return_inverse=True)
    held = np.zeros((len(ranks), len(piece)), np.int64)
    np.add.at(held, place, parts)
    found: Ints = held.max(0)
    if instance.shared.any():
        link = np.zeros((instance.hosts, int(instance.shared.sum())), np.int64)
        np.add.at(link, instance.host_of[ranks], held[:, instance.shared])
        found[instance.shared] = (link // instance.host_sizes[:, None]).max(0)
    return found


def _pinned(decision: Decision, work: TableWork, sharding: ParameterSharding) -> tuple[int, tuple[int, ...]]:
    """Return bytes on all ranks, and [S] ps on the rank with most of a pinned table.

    The ps include the rank's own batch, as the price does not separate it. With more than `PRICED_PINS` pins: ().
    """
    tiling, problem = sharding.tiling, decision.problem
    assert tiling is not None
    alone = Workload([work])
    size = 0
    for tile in rectangles(tiling):
        rows, width = tile.r1 - tile.r0, tile.c1 - tile.c0
        cell = int(alone.element[0] + alone.cell_state[0])
        size += len(tile.owners) * rows * (width * cell + int(alone.row_state[0]))
    if len(decision.pins) > PRICED_PINS:
        return size, ()
    found = price([tiling], Model(alone, decision.request.topology)).stages
    step = problem.model.speeds.step
    owners = np.array(tiling.ranks())
    total = sum(seconds[owners] for seconds in found.values())
    most = int(owners[int(np.argmax(total))])
    ps = []
    for s, name in enumerate(problem.stages):
        own = float(found[name][most]) - (step if s == 0 else 0.0)
        ps.append(max(0, round(own * PICO)))
    return size, tuple(ps)
