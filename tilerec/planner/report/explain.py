"""Why tables are cut as they are: every way that was considered, what it costs, and what the step would take with it.

    step then   the whole step, if this table were cut so and everything else stayed where it is; its pieces go to the
                ranks where they add least, of those that it may lie on. Tables that lie together are cut together
    ruled out   a way that the table's constraints, its size or the tables that lie with it do not leave open
                (ruled_out.py)

Legend: G tables and groups, T tables, O options, S stages, R ranks, M tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.colocation import together
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.options import Problem
from tilerec.planner.cost.ways import Limits
from tilerec.planner.decision import decide, problem_of
from tilerec.planner.infeasible import no_plan
from tilerec.planner.report.ruled_out import ruled_out
from tilerec.planner.report.text import aligned, time_text
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.instance import PER_MILLE, Instance, Ints, loads, work_of
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.tile import Tiling


@dataclass(frozen=True)
class Considered:
    """One way to cut the table.

    Args:
        option: what it is called. chosen: the plan has it.
        ruled_out: why the way is not open to the table; "" where it is.
        pieces: how many; on `width` ranks each.
        piece_bytes: on each rank that holds a piece, what the way takes on every rank included.
        owner_ps: what a piece adds on a rank that holds it (the slowest one), all stages together.
        home_ps: what it adds on every rank, the mean where hosts differ in size.
        step_ps: the step then.
        short: bytes beyond the caps on the rank with most of them; 0 if it fits.
    """

    option: str
    chosen: bool
    ruled_out: str
    pieces: int
    width: int
    piece_bytes: int
    owner_ps: int
    home_ps: int
    step_ps: int
    short: int

    @property
    def allowed(self) -> bool:
        """Whether the way is open to the table."""
        return not self.ruled_out


@dataclass(frozen=True)
class Explanation:
    """Why a table is cut as it is.

    Args:
        table: its key. path, name, tiling: its place in the plan, and where its cells are there.
        step_ps: of the plan. bound_ps: no plan takes less.
        considered: the chosen way first, then by `step_ps`; ways that are ruled out last.
        together: keys of the tables that lie with it.
    """

    table: str
    step_ps: int
    considered: tuple[Considered, ...]
    notes: tuple[str, ...] = ()
    path: str = ""
    name: str = ""
    tiling: Tiling | None = None
    bound_ps: int = 0
    together: tuple[str, ...] = ()

    def is_in(self, plan: ShardingPlan) -> bool:
        """Whether a plan has the table where this explains it to be."""
        part = plan.plan.get(self.path)
        there = None if part is None else part.get(self.name)
        return there is not None and there.tiling == self.tiling

    @property
    def chosen(self) -> Considered:
        return self.considered[0]

    def __str__(self) -> str:
        rows = []
        for way in self.considered:
            rows.append(
                (
                    way.option,
                    f"{way.pieces} x {way.width}" if way.width > 1 else str(way.pieces),
                    bytes_text(way.piece_bytes),
                    time_text(way.owner_ps),
                    time_text(way.home_ps),
                    time_text(way.step_ps),
                    self.verdict(way),
                )
            )
        names = ("way", "pieces", "bytes each", "adds on owners", "on all ranks", "step then", "")
        return "\n\n".join(
            [f"Table '{self.table}': {self.reason()}", aligned(names, rows, right=(2, 3, 4, 5)), *self.notes]
        )

    def verdict(self, way: Considered, time: Callable[[int], str] = time_text) -> str:
        """What speaks for or against a way, in a few words; `time` writes picoseconds."""
        if way.chosen:
            return "chosen"
        if way.ruled_out:
            return f"ruled out: {way.ruled_out}"
        if way.short:
            return f"does not fit: {bytes_text(way.short)} too much"
        more = way.step_ps - self.step_ps
        return f"+{time(more)}" if more > 0 else ("as fast" if not more else f"-{time(-more)}")

    def reason(self, time: Callable[[int], str] = time_text) -> str:
        """Why the chosen way, as a sentence; `time` writes picoseconds."""
        chosen = self.chosen.option
        if len(self.considered) == 1:
            return f"{chosen} is the only way to cut it on these machines."
        others = [way for way in self.considered[1:] if way.allowed]
        open_ = [way for way in others if not way.short]
        if not others:
            return f"{chosen} is the only way that is open to it; every other one is ruled out."
        if not open_:
            return f"{chosen} is the only open way that fits with everything else where it is."
        best = min(open_, key=lambda way: way.step_ps)
        more = best.step_ps - self.step_ps
        if more > 0:
            return (
                f"with everything else where it is, {chosen} makes the fastest step; the next best, {best.option}, "
                f"would take {time(more)} more."
            )
        if more == 0:
            return f"{chosen} and {best.option} make equally fast steps."
        gap = time(self.step_ps - self.bound_ps)
        return (
            f"{chosen}; {best.option} would save {time(-more)} with everything else where it is. The search did "
            f"not find that, and its plan may be up to {gap} above the least possible step: a larger effort may help."
        )


def explain(request: PlanRequest, table: str) -> Explanation:
    """Every way to cut one table, in the plan of a request.

    Args:
        table: its key, or its name if only one has it.

    Raises:
        PlannerError: the request has no plan.
        ConfigError: there is no such table, or it was given by hand.
    """
    return Explainer(request, (_key(request, table),)).explanation(_key(request, table))


def _key(request: PlanRequest, table: str) -> str:
    if table in request.by_key:
        return table
    found = [t.key for t in request.tables if any(name == table for _, name in t.names)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"There are several tables '{table}': {found[:8]}; name one of these.")
    names = [t.key for t in request.tables]
    raise ConfigError(f"There is no table '{table}'; there are {names[:8]}{' and more' * (len(names) > 8)}.")


class Explainer:
    """Explains tables of one plan, which is made once.

    Args:
        request: of the plan.
        keys: tables whose restrictions are taken off to price the ways that they rule out; None: all.

    Raises:
        PlannerError: the request has no plan.
    """

    def __init__(self, request: PlanRequest, keys: Sequence[str] | None = None) -> None:
        self.decision = decide(request)
        if not self.decision.found:
            raise no_plan(self.decision)
        self.request, self.pins = request, self.decision.pins
        self.limits = request.limits(self.pins, self.decision.offload)
        own = self.decision.problem
        self.names = own.instance.names
        self.groups: dict[int, list[int]] = {}
        for t, row in enumerate(self.decision.row.tolist()):
            self.groups.setdefault(row, []).append(t)
        self.wanted = {t.key for t in request.tables} if keys is None else set(keys)
        self.problem, self.freed = self._freed(self.wanted)
        # Tables that lie together are one table here, as in the search.
        self.instance, _ = together(self.problem.instance, request.groups(self.pins))
        place = {option: o for o, option in enumerate(self.problem.options)}
        solution = self.decision.solution
        self.option = np.array([place[own.options[o]] for o in solution.option.tolist()], np.int64)
        self.work, self.memory = work_of(self.instance, self.option, solution.places, solution.rows)
        self.uses = self.instance.uses[np.arange(len(self.option)), self.option].sum(0)
        # What the search takes a step for, and by how much the price of the plan differs from it.
        taken, priced = self._cost(self.work, self.uses), self.decision.priced
        assert priced is not None
        self.step_ps, self.differs = priced.cost_ps, priced.cost_ps - taken

    @property
    def tables(self) -> list[str]:
        """Keys of the tables that can be explained: all but those that were given by hand."""
        return list(self.names)

    def _freed(self, keys: set[str]) -> tuple[Problem, set[str]]:
        """The decision's problem with no restriction on some tables and the tables that lie with them.

        Second, the tables for which that was possible: rows over more ranks than there are rows are only an option for
        tables whose constraints name the type.
        """
        freed = {self.names[m] for own in self.groups.values() for m in own if self._any(own, keys)}
        while freed:
            problem = self._without_limits(freed)
            lost = {self.names[t] for t in self._lost(problem)} & freed
            if not lost:
                return problem, freed
            freed -= lost
        return self.decision.problem, freed

    def _any(self, tables: Sequence[int], keys: set[str]) -> bool:
        return any(self.names[t] in keys for t in tables)

    def _without_limits(self, keys: set[str]) -> Problem:
        request = self.request
        free = {
            key: replace(
                request.limits_of(key) or ParameterConstraints(), sharding_types=None, forbidden_types=(), ranks=None,
                hosts=None, max_ranks=None, with_table=None, min_partition=1,
            )
            for key in sorted(keys)
        }  # fmt: skip
        freed = replace(request, constraints={**request.constraints, **free})
        return problem_of(freed, self.pins, self.decision.offload)

    def _lost(self, problem: Problem) -> list[int]:
        """Tables whose way in the plan a problem lacks."""
        place = {option: o for o, option in enumerate(problem.options)}
        own = self.decision.problem.options
        chosen = [place.get(own[self.decision.option(t)]) for t in range(len(self.names))]
        return [t for t, o in enumerate(chosen) if o is None or not problem.instance.there[t, o]]

    def _cost(self, work: Ints, uses: Ints) -> int:
        charge = self.instance.charge[uses > 0]
        return int(self.instance.longest(loads(self.instance, work).max(0)).sum()) + int(charge.sum())

    def explanation(self, key: str) -> Explanation:
        """Explain one table.

        Raises:
            ConfigError: it was given by hand.
        """
        if key in self.pins:
            raise ConfigError(
                f"Table '{key}' was given by hand, or lies with one that was, so nothing was considered for it."
            )
        t = self.names.index(key)
        row = int(self.decision.row[t])
        rest = _Rest(self, row)
        found = [self._considered(rest, t, o) for o in np.flatnonzero(self.instance.there[row]).tolist()]
        found.sort(key=lambda way: (not way.chosen, not way.allowed, way.short > 0, way.step_ps, way.option))
        path, name = self.request.by_key[key].names[0]
        others = tuple(self.names[m] for m in self.groups[row] if m != t)
        return Explanation(
            key, self.step_ps, tuple(found), tuple(self._notes(key, t, others)), path, name,
            self._tilings[key], self.decision.bound, others,
        )  # fmt: skip

    @cached_property
    def _tilings(self) -> dict[str, Tiling | None]:
        return {key: sharding.tiling for key, sharding in self.decision.shardings().items()}

    def _notes(self, key: str, t: int, together: Sequence[str]) -> Iterator[str]:
        if together:
            names = ", ".join(f"'{other}'" for other in together[:8]) + (
                " and more" if len(together) > 8 else ""
            )
            yield (
                f"It lies with {names}, as constraints say (with_table): a step then is with all of them cut alike; "
                "the figures of pieces are its own."
            )
        if self.decision.shares(t) is not None:
            yield "Its rows are cut unevenly, to even out the ranks."
        if key not in self.freed:
            yield "Ways that its constraints rule out were not considered."

    def _considered(self, rest: _Rest, t: int, o: int) -> Considered:
        chosen = int(self.option[rest.row]) == o
        work, memory = rest.chosen() if chosen else rest.with_option(o)
        uses = rest.uses + self.instance.uses[rest.row, o]
        own = self.problem.instance
        return Considered(
            str(self.problem.options[o]),
            chosen,
            "" if chosen else self._ruled_out(rest, t, o),
            int(own.pieces[t, o]),
            int(own.width[t, o]),
            int((own.memory + own.home_memory)[t, o].sum()),
            int((_spread(own, t, o) * own.slow.max(0) // PER_MILLE)[own.first].sum()),
            int((own.home[t, o] * (own.reach.sum(0) // own.ranks) // PER_MILLE)[own.first].sum()),
            self._cost(work, uses) + self.differs,
            max(0, int((memory - own.cap).max())),
        )

    def _ruled_out(self, rest: _Rest, t: int, o: int) -> str:
        option, topology = self.problem.options[o], self.request.topology
        for m in sorted(self.groups[rest.row], key=lambda m: m != t):
            key = self.names[m]
            limits = self.limits.get(key, Limits())
            given = self.request.limits_of(key)
            reasons = ruled_out(option, self.problem.tables[m].dim, limits, given, topology, rest.allowed)
            if reasons:
                said = "; ".join(reasons)
                return said if m == t else f"of '{key}', which lies with it: {said}"
        return ""


class _Rest:
    """All that lies on the ranks but one table, or the tables that lie together as one.

    row: its number. work, memory: [R, S] and [R, M] of the others. uses: [F] how many others use a collective.
    allowed: [R] the ranks that it may lie on; None for all.
    """

    def __init__(self, explainer: Explainer, row: int) -> None:
        whole, solution = explainer.instance, explainer.decision.solution
        self.row, self.whole = row, explainer
        self.instance = whole.take(np.array([row]))
        self.uneven = {0: solution.rows[row]} if row in solution.rows else {}
        own, held = self._added(int(explainer.option[row]), solution.places[row], self.uneven)
        self.work, self.memory = explainer.work - own, explainer.memory - held
        self.uses = explainer.uses - whole.uses[row, explainer.option[row]]
        allowed = explainer.decision.instance.allowed
        self.allowed = None if allowed is None else allowed[row]

    def _added(self, o: int, places: tuple[int, ...], rows: Mapping[int, Ints]) -> tuple[Ints, Ints]:
        """[R + 1, S] work and [R, M] bytes of an option alone."""
        work, memory = work_of(self.instance, np.array([o]), [places], rows)
        return work, memory - self.instance.base_memory

    def chosen(self) -> tuple[Ints, Ints]:
        """[R + 1, S] work and [R, M] bytes of everything, as the plan has it."""
        return self.whole.work, self.whole.memory

    def with_option(self, o: int) -> tuple[Ints, Ints]:
        """[R + 1, S] work and [R, M] bytes of everything, with the table cut by an option in even pieces."""
        work, memory = self._added(o, self._places(o), {})
        return self.work + work, self.memory + memory

    def _places(self, o: int) -> tuple[int, ...]:
        """Ranks, or hosts, for the pieces of an option: one by one, where the step grows least and memory holds."""
        instance = self.instance
        width = int(instance.width[0, o])
        if instance.everywhere(width):
            return ()
        # [spots, ·] of single ranks, or of hosts of the right size: their slowest rank, and their least room.
        load = loads(instance, self.work)
        room = instance.cap - self.memory - instance.home_memory[0, o]
        spots = [np.array([r]) for r in range(instance.ranks)] if width == 1 else list(instance.host_ranks)
        usable = np.array([len(ranks) == width for ranks in spots])
        if self.allowed is not None:
            inside = usable & np.array([self.allowed[ranks].all() for ranks in spots])
            usable = inside if inside.any() else usable
        if width > 1:
            load = np.stack([load[ranks].max(0) for ranks in spots])
            room = np.stack([room[ranks].min(0) for ranks in spots])
        slow = np.stack([instance.slow[ranks].max(0) for ranks in spots])
        own, size = _spread(instance, 0, o) * slow // PER_MILLE, instance.memory[0, o]
        taken: list[int] = []
        for _ in range(int(instance.pieces[0, o])):
            fresh = usable.copy()
            fresh[taken] = False
            candidates = np.flatnonzero(fresh if fresh.any() else usable)
            short = np.maximum(size - room[candidates], 0).sum(1)
            step = instance.longest(np.maximum(load.max(0), load[candidates] + own[candidates])).sum(1)
            order = np.lexsort((candidates, load[candidates].sum(1), step, short))
            best = int(candidates[order[0]])
            taken.append(best)
            load[best] += own[best]
            room[best] -= size
        return tuple(taken)


def _spread(instance: Instance, t: int, o: int) -> Ints:
    """[S] what a piece adds to a rank that holds it; its part, where a host's link is shared."""
    own = instance.cost[t, o].copy()
    if instance.shared.any() and instance.width[t, o] == 1:
        own[instance.shared] //= int(instance.host_sizes.max())
    return own
