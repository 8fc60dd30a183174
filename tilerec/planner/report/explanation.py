"""Explanations of a plan: every option of a table, its cost, and the step time with this option.

    step then   the time of the whole step if this table had this option and all other tables stayed unchanged. Its
                pieces are placed on those allowed ranks where they add least. Co-located tables change together
    ruled out   an option that the table's constraints, its size or its co-located tables forbid

Legend: G tables and groups, T tables, O options, S stages, R ranks, M tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.constraints import FREE_PLACEMENT
from tilerec.planner.cost.options import Problem
from tilerec.planner.cost.ways import Limits
from tilerec.planner.decision import decide
from tilerec.planner.planner_error import planner_error_of
from tilerec.planner.report.option_restrictions import violated_restrictions
from tilerec.planner.report.time_text import time_text
from tilerec.planner.request import PlanRequest
from tilerec.planner.request_problem import build_problem, merged_instance
from tilerec.planner.search.instance import PER_MILLE, Instance, Ints, loads, work_of
from tilerec.planner.table_limits import limits_of_tables
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.plan_table import bytes_text, format_columns
from tilerec.spec.tile import Tiling


@dataclass(frozen=True)
class ConsideredOption:
    """One option of a table.

    Args:
        option: name of the option.
        chosen: True if the plan uses it.
        ruled_out: reason why the option is not allowed; "" if it is allowed.
        pieces: number of pieces, on `width` ranks each.
        piece_bytes: bytes on each rank that holds a piece, including bytes that the option needs on every rank.
        owner_ps: time that a piece adds on a rank that holds it (the slowest one), over all stages.
        home_ps: time that the option adds on every rank; the mean if hosts differ in size.
        step_ps: time of the step with this option.
        short: bytes above the caps, on the rank with most such bytes; 0 if it fits.
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
        """True if no restriction rules the option out."""
        return not self.ruled_out


@dataclass(frozen=True)
class Explanation:
    """All options of one table, with the reason for the chosen one.

    Args:
        table: the table's key.
        step_ps: time of a step with the plan.
        considered: the chosen option first, the others by `step_ps`, options that are ruled out last.
        notes: remarks for the reader.
        path, name: path of the table's module, and the table's name.
        tiling: the table's tiling in the plan.
        bound_ps: lower bound on the time of a step, over all plans.
        together: keys of the co-located tables.
        curve: (k, share of the ids that its k most frequent ones have) of a table that may have a head.
        ordered: its ids are numbered by frequency, so the k most frequent ones are its first k rows.
    """

    table: str
    step_ps: int
    considered: tuple[ConsideredOption, ...]
    notes: tuple[str, ...] = ()
    path: str = ""
    name: str = ""
    tiling: Tiling | None = None
    bound_ps: int = 0
    together: tuple[str, ...] = ()
    curve: tuple[tuple[int, float], ...] = ()
    ordered: bool = False

    def is_in(self, plan: ShardingPlan) -> bool:
        """Return True if the plan has the tiling of this table that is explained here."""
        part = plan.plan.get(self.path)
        there = None if part is None else part.get(self.name)
        return there is not None and there.tiling == self.tiling

    @property
    def chosen(self) -> ConsideredOption:
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
            [
                f"Table '{self.table}': {self.reason()}",
                format_columns(names, rows, right=(2, 3, 4, 5)),
                *self.notes,
            ]
        )

    def verdict(self, way: ConsideredOption, time: Callable[[int], str] = time_text) -> str:
        """Return the comparison of an option with the chosen one, in a few words; `time` formats picoseconds."""
        if way.chosen:
            return "chosen"
        if way.ruled_out:
            return f"ruled out: {way.ruled_out}"
        if way.short:
            return f"does not fit: {bytes_text(way.short)} too much"
        more = way.step_ps - self.step_ps
        return f"+{time(more)}" if more > 0 else ("as fast" if not more else f"-{time(-more)}")

    def reason(self, time: Callable[[int], str] = time_text) -> str:
        """Return the reason for the chosen option as a sentence; `time` formats picoseconds."""
        chosen = self.chosen.option
        if len(self.considered) == 1:
            return f"{chosen} is the only option on these machines."
        others = [way for way in self.considered[1:] if way.allowed]
        open_ = [way for way in others if not way.short]
        if not others:
            return f"{chosen} is the only allowed option; every other one is ruled out."
        if not open_:
            return f"{chosen} is the only allowed option that fits with all other tables unchanged."
        best = min(open_, key=lambda way: way.step_ps)
        more = best.step_ps - self.step_ps
        if more > 0:
            return (
                f"with all other tables unchanged, {chosen} makes the fastest step; the next best, {best.option}, "
                f"would take {time(more)} more."
            )
        if more == 0:
            return f"{chosen} and {best.option} make equally fast steps."
        gap = time(self.step_ps - self.bound_ps)
        return (
            f"{chosen}; {best.option} would save {time(-more)} with all other tables unchanged. The search did not "
            f"find that plan. Its plan may be up to {gap} above the least possible step: a larger effort may help."
        )


def explain(request: PlanRequest, table: str) -> Explanation:
    """Return all options of one table in the plan of a request.

    Args:
        table: the table's key, or its name if the name is unique.

    Raises:
        PlannerError: the request has no plan.
        ConfigError: there is no such table, or it is pinned.
    """
    return Explainer(request, (_key(request, table),)).explanation(_key(request, table))


def _key(request: PlanRequest, table: str) -> str:
    if table in request.by_key:
        return table
    found = [t.key for t in request.tables if any(name == table for _, name in t.names)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"There are several tables '{table}': {found[:8]}; use one of these keys.")
    names = [t.key for t in request.tables]
    raise ConfigError(f"There is no table '{table}'; there are {names[:8]}{' and more' * (len(names) > 8)}.")


class Explainer:
    """Explanations of the tables of one plan. The constructor makes the plan.

    Args:
        request: the request of the plan.
        keys: tables for which the options that constraints rule out are priced, too; None: all.

    Raises:
        PlannerError: the request has no plan.
    """

    def __init__(self, request: PlanRequest, keys: Sequence[str] | None = None) -> None:
        self.decision = decide(request)
        if not self.decision.found:
            raise planner_error_of(self.decision)
        self.request, self.pins = request, self.decision.pins
        self.limits = limits_of_tables(request, self.pins, self.decision.offload)
        own = self.decision.problem
        self.names = own.instance.names
        self.groups: dict[int, list[int]] = {}
        for t, row in enumerate(self.decision.row.tolist()):
            self.groups.setdefault(row, []).append(t)
        self.wanted = {t.key for t in request.tables} if keys is None else set(keys)
        self.problem, self.freed = self._without_restrictions(self.wanted)
        # Co-located tables are one table here, as in the search.
        self.instance, _ = merged_instance(request, self.pins, self.problem.instance)
        place = {option: o for o, option in enumerate(self.problem.options)}
        solution = self.decision.solution
        self.option = np.array([place[own.options[o]] for o in solution.option.tolist()], np.int64)
        self.work, self.memory = work_of(self.instance, self.option, solution.places, solution.rows)
        self.uses = self.instance.uses[np.arange(len(self.option)), self.option].sum(0)
        # The search's cost of a step, and the difference between the price of the plan and this cost.
        taken, priced = self._cost(self.work, self.uses), self.decision.priced
        assert priced is not None
        self.step_ps, self.differs = priced.cost_ps, priced.cost_ps - taken

    @property
    def tables(self) -> list[str]:
        """Keys of the tables that can be explained: all tables that are not pinned."""
        return list(self.names)

    def _without_restrictions(self, keys: set[str]) -> tuple[Problem, set[str]]:
        """Return the decision's problem without restrictions on some tables and the tables co-located with them.

        Also returns the tables for which this was possible. A split of rows over more ranks than rows is an option only
        for tables whose constraints name the type, so these tables keep their restrictions if the plan uses it.
        """
        groups = ({self.names[t] for t in own} for own in self.groups.values())
        freed = {name for names in groups if names & keys for name in names}
        while freed:
            problem = self._without_limits(freed)
            lost = {self.names[t] for t in self._without_chosen_option(problem)} & freed
            if not lost:
                return problem, freed
            freed -= lost
        return self.decision.problem, freed

    def _without_limits(self, keys: set[str]) -> Problem:
        freed = self.request.with_constraints(sorted(keys), **FREE_PLACEMENT, with_table=None, min_partition=1)
        return build_problem(freed, self.pins, self.decision.offload)

    def _without_chosen_option(self, problem: Problem) -> list[int]:
        """Return the tables for which a problem lacks the option that the plan uses."""
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
            ConfigError: the table is pinned.
        """
        if key in self.pins:
            raise ConfigError(
                f"Table '{key}' is pinned, or co-located with a pinned table, so no options were considered for it."
            )
        t = self.names.index(key)
        row = int(self.decision.row[t])
        rest = _OtherTables(self, row)
        found = [self._considered(rest, t, o) for o in np.flatnonzero(self.instance.there[row]).tolist()]
        found.sort(key=lambda way: (not way.chosen, not way.allowed, way.short > 0, way.step_ps, way.option))
        path, name = self.request.by_key[key].names[0]
        others = tuple(self.names[m] for m in self.groups[row] if m != t)
        return Explanation(
            key, self.step_ps, tuple(found), tuple(self._notes(key, t, others)), path, name,
            self._tilings[key], self.decision.bound, others,
            self.problem.read_curve(t) if self._has_heads(t) else (),
            bool(self.problem.model.workload.ordered[t]),
        )  # fmt: skip

    @cached_property
    def _tilings(self) -> dict[str, Tiling | None]:
        return {key: sharding.tiling for key, sharding in self.decision.shardings().items()}

    def _has_heads(self, t: int) -> bool:
        skew = self.problem.tables[t].skew
        return skew is not None and (skew.ordered or bool(skew.hot)) and self.request.topology.world_size > 1

    def _notes(self, key: str, t: int, together: Sequence[str]) -> Iterator[str]:
        if together:
            names = ", ".join(f"'{other}'" for other in together[:8]) + (" and more" if len(together) > 8 else "")
            yield (
                f"It is co-located with {names} (with_table): 'step then' is with the same option for all of them; the "
                "figures of pieces are for this table alone."
            )
        if self._has_heads(t):
            sizes = self.problem.head_bytes(t)
            if len(sizes) > 1:
                yield _heads_text(sizes, ordered=bool(self.problem.model.workload.ordered[t]))
        if self.decision.shares(t) is not None:
            yield "Its rows are split unevenly, to balance the ranks."
        if key not in self.freed:
            yield "Options that its constraints rule out were not considered."

    def _considered(self, rest: _OtherTables, t: int, o: int) -> ConsideredOption:
        chosen = int(self.option[rest.row]) == o
        work, memory = rest.chosen() if chosen else rest.with_option(o)
        uses = rest.uses + self.instance.uses[rest.row, o]
        own = self.problem.instance
        return ConsideredOption(
            self.problem.option_text(t, o),
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

    def _ruled_out(self, rest: _OtherTables, t: int, o: int) -> str:
        option, topology = self.problem.options[o], self.request.topology
        for m in sorted(self.groups[rest.row], key=lambda m: m != t):
            key = self.names[m]
            limits = self.limits.get(key, Limits())
            given = self.request.limits_of(key)
            reasons = violated_restrictions(option, self.problem.tables[m], limits, given, topology, rest.allowed)
            if reasons:
                text = "; ".join(reasons)
                return text if m == t else f"of '{key}', which is co-located with it: {text}"
        return ""


class _OtherTables:
    """Load of all tables except one (or one group of co-located tables).

    row: number of the excluded table. work, memory: [R, S] work and [R, M] bytes of the others. uses: [F] number of
    the others that use each collective. allowed: [R] True for ranks that may hold the excluded table; None for all.
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
        """Return [R + 1, S] work and [R, M] bytes of one option of the table alone."""
        work, memory = work_of(self.instance, np.array([o]), [places], rows)
        return work, memory - self.instance.base_memory

    def chosen(self) -> tuple[Ints, Ints]:
        """Return [R + 1, S] work and [R, M] bytes of all tables, as in the plan."""
        return self.whole.work, self.whole.memory

    def with_option(self, o: int) -> tuple[Ints, Ints]:
        """Return [R + 1, S] work and [R, M] bytes of all tables, with an option of even pieces for this table."""
        work, memory = self._added(o, self._places(o), {})
        return self.work + work, self.memory + memory

    def _places(self, o: int) -> tuple[int, ...]:
        """Return ranks, or hosts, for the pieces of an option.

        Places one piece after the other, where memory suffices and the step grows least.
        """
        instance = self.instance
        width = int(instance.width[0, o])
        if instance.everywhere(width):
            return ()
        # [spots, ·] for single ranks, or hosts of the right size: load of the slowest rank, least free memory.
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
    """Return [S] time that a piece adds on a rank that holds it; on shared links of hosts, the rank's part."""
    own = instance.cost[t, o].copy()
    if instance.shared.any() and instance.width[t, o] == 1:
        own[instance.shared] //= int(instance.host_sizes.max())
    return own


def _heads_text(sizes: Sequence[tuple[int, float, float]], *, ordered: bool) -> str:
    """Return a sentence about the bytes without a head and with heads; sizes: as `Problem.head_bytes`."""
    known, rows = (
        ("Its ids are numbered by frequency", "first rows") if ordered else ("Its hot ids are known", "hot rows")
    )
    first, *others = [(rows, reads, bytes_text(round(sent))) for rows, reads, sent in sizes]
    each = ", ".join(f"{sent} with {rows:,} ({reads:.0%} of the ids)" for rows, reads, sent in others)
    return (
        f"{known}. In ranges of rows on all ranks, a rank sends {first[2]} in a step; with "
        f"its {rows} on every rank, {each}."
    )
