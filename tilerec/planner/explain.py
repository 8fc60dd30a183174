"""Why a table is cut as it is: every way that was considered, what it costs, and what the step would take with it.

    step then   the whole step, if this table were cut so and everything else stayed where it is; its pieces go to the
                ranks where they add least

Legend: O options, S stages, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.cost.options import Problem
from tilerec.planner.cost.ways import Option
from tilerec.planner.decision import Decision, decide, problem_of
from tilerec.planner.infeasible import no_plan
from tilerec.planner.report_text import aligned, time_text
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.instance import Instance, Ints, evaluate, fits
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.tile import Tiling


@dataclass(frozen=True)
class Considered:
    """One way to cut the table.

    Args:
        option: what it is called. chosen: the plan has it. allowed: the table's constraints do.
        pieces: how many; on `width` ranks each.
        piece_bytes: of a piece, on each rank that holds it.
        owner_ps: what a piece adds on a rank that holds it, all stages together. home_ps: what it adds on every rank.
        step_ps: the step then.
        short: bytes beyond the caps; 0 if it fits.
    """

    option: str
    chosen: bool
    allowed: bool
    pieces: int
    width: int
    piece_bytes: int
    owner_ps: int
    home_ps: int
    step_ps: int
    short: int


@dataclass(frozen=True)
class Explanation:
    """Why a table is cut as it is.

    Args:
        table: its key. path, name, tiling: its place in the plan, and where its cells are there.
        step_ps: of the plan.
        considered: the chosen way first, then by `step_ps`.
    """

    table: str
    step_ps: int
    considered: tuple[Considered, ...]
    notes: tuple[str, ...] = ()
    path: str = ""
    name: str = ""
    tiling: Tiling | None = None

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
                    self._verdict(way),
                )
            )
        names = ("way", "pieces", "bytes each", "adds on owners", "on all ranks", "step then", "")
        return "\n\n".join(
            [f"Table '{self.table}': {self._reason()}", aligned(names, rows, right=(2, 3, 4, 5)), *self.notes]
        )

    def _verdict(self, way: Considered) -> str:
        if way.chosen:
            return "chosen"
        if not way.allowed:
            return "not allowed by its constraints"
        if way.short:
            return f"does not fit: {bytes_text(way.short)} too much"
        more = way.step_ps - self.step_ps
        return f"+{time_text(more)}" if more > 0 else ("as fast" if not more else f"-{time_text(-more)}")

    def _reason(self) -> str:
        chosen = self.chosen
        others = [way for way in self.considered[1:] if way.allowed]
        open_ = [way for way in others if not way.short]
        if not others:
            return f"{chosen.option} is all that its constraints allow."
        if not open_:
            return f"{chosen.option} is the only way that fits."
        best = min(open_, key=lambda way: way.step_ps)
        more = best.step_ps - self.step_ps
        if more > 0:
            return (
                f"with everything else where it is, {chosen.option} makes the fastest step; the next best, "
                f"{best.option}, would take {time_text(more)} more."
            )
        if more == 0:
            return f"{chosen.option} and {best.option} make equally fast steps; the slowest ranks are others."
        return (
            f"{chosen.option}; {best.option} would save {time_text(-more)} with everything else where it is, which is "
            "within the plan's gap (a larger effort may find it)."
        )


def explain(request: PlanRequest, table: str) -> Explanation:
    """Every way to cut one table, in the plan of a request.

    Args:
        table: its key, or its name if only one has it.

    Raises:
        PlannerError: the request has no plan.
        ConfigError: there is no such table, or it was given by hand.
    """
    key = _key(request, table)
    decision = decide(request)
    if not decision.found:
        raise no_plan(decision)
    if key in decision.pins:
        raise ConfigError(
            f"Table '{key}' was given by hand, or lies with one that was, so nothing was considered for it."
        )
    free = _freed(request, key)
    problem = problem_of(free, decision.pins, decision.offload)
    notes = []
    if not _has(problem, decision, key):
        # Rows over more ranks than there are rows are only for who asks for them by name.
        problem = decision.problem
        notes.append("Ways that its constraints rule out were not considered.")
    return _Explaining(decision, problem, key).result(notes)


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


def _freed(request: PlanRequest, key: str) -> PlanRequest:
    """The request with no restriction on one table."""
    if key not in request.constraints:
        return request
    return request.with_constraint(
        key, sharding_types=None, forbidden_types=(), ranks=None, hosts=None, max_ranks=None, with_table=None,
        min_partition=1,
    )  # fmt: skip


def _has(problem: Problem, decision: Decision, key: str) -> bool:
    """Whether a problem has the ways in which the decision cuts all tables, and for this table its own."""
    own = decision.problem
    chosen = {own.options[decision.option(t)] for t in range(own.instance.tables)}
    t = own.instance.names.index(key)
    mine = own.options[decision.option(t)]
    return chosen <= set(problem.options) and bool(problem.instance.there[t, problem.options.index(mine)])


class _Explaining:
    """One table's options, with all other tables where the decision has them."""

    def __init__(self, decision: Decision, problem: Problem, key: str) -> None:
        self.decision, self.problem, self.key = decision, problem, key
        self.instance = problem.instance
        self.t = self.instance.names.index(key)
        # The same tables in the same order; columns may be more here.
        place = {option: o for o, option in enumerate(problem.options)}
        own = decision.problem.options
        self.option = np.array(
            [place[own[decision.option(t)]] for t in range(self.instance.tables)], np.int64
        )
        self.places = [decision.places(t) for t in range(self.instance.tables)]
        self.rows = {
            t: shares for t in range(self.instance.tables) if (shares := decision.shares(t)) is not None
        }
        others = np.array([t for t in range(self.instance.tables) if t != self.t], np.int64)
        number = {t: i for i, t in enumerate(others.tolist())}
        self.rest = evaluate(
            self.instance.take(others),
            self.option[others],
            [self.places[t] for t in others.tolist()],
            {number[t]: shares for t, shares in self.rows.items() if t != self.t},
        )

    def result(self, notes: Sequence[str]) -> Explanation:
        decision, instance, t = self.decision, self.instance, self.t
        now = evaluate(instance, self.option, self.places, self.rows).cost
        chosen = int(self.option[t])
        found = []
        before = decision.problem.instance.there[t]
        allowed = {option for o, option in enumerate(decision.problem.options) if before[o]}
        limits = decision.request.limits_of(self.key)
        most = None if limits is None else limits.max_ranks
        for o in np.flatnonzero(instance.there[t]).tolist():
            option = self.problem.options[o]
            places = self.places[t] if o == chosen else self._places(o)
            held = min(int(instance.width[t, o] * instance.pieces[t, o]), instance.ranks)
            found.append(
                self._considered(o, option, places, o == chosen, option in allowed and held <= (most or held))
            )
        found.sort(key=lambda way: (not way.chosen, not way.allowed, way.short > 0, way.step_ps, way.option))
        notes = list(notes)
        if limits is not None and limits.with_table is not None:
            notes.append(
                f"It lies with '{limits.with_table}', as its constraints say; the figures are its own."
            )
        if t in self.rows:
            notes.append("Its rows are cut unevenly, to even out the ranks.")
        path, name = decision.request.by_key[self.key].names[0]
        tiling = decision.shardings()[self.key].tiling
        return Explanation(self.key, now, tuple(found), tuple(notes), path, name, tiling)

    def _considered(
        self, o: int, option: Option, places: tuple[int, ...], chosen: bool, allowed: bool
    ) -> Considered:
        instance, t = self.instance, self.t
        options, where, rows = self.option.copy(), list(self.places), dict(self.rows)
        options[t], where[t] = o, places
        if not chosen:
            rows.pop(t, None)
        then = evaluate(instance, options, where, rows)
        short = 0
        if not fits(instance, then.memory):
            short = max(1, int((then.memory - instance.cap).max()))
        return Considered(
            str(option),
            chosen,
            allowed,
            int(instance.pieces[t, o]),
            int(instance.width[t, o]),
            int(instance.memory[t, o].sum()),
            int(_spread(instance, t, o).sum()),
            int(instance.home[t, o].sum()),
            then.cost,
            short,
        )

    def _places(self, o: int) -> tuple[int, ...]:
        """Ranks, or hosts, for the pieces of an option: one by one, where the step grows least and memory holds."""
        instance, t = self.instance, self.t
        width = int(instance.width[t, o])
        if width == instance.ranks and instance.ranks > 1:
            return ()
        load, memory = self.rest.load.copy(), self.rest.memory.copy()
        spots: list[Ints] = [np.array([r]) for r in range(instance.ranks)]
        if width > 1:
            spots = [ranks if len(ranks) == width else np.zeros(0, np.int64) for ranks in instance.host_ranks]
        taken: list[int] = []
        for _ in range(int(instance.pieces[t, o])):
            best = self._best(o, spots, load, memory, taken)
            taken.append(best)
            load[spots[best]] += _spread(instance, t, o)
            memory[spots[best]] += instance.memory[t, o]
        return tuple(taken)

    def _best(self, o: int, spots: list[Ints], load: Ints, memory: Ints, taken: list[int]) -> int:
        instance, t = self.instance, self.t
        top = load.max(0)
        own, room = _spread(instance, t, o), instance.cap - memory
        usable = [s for s, ranks in enumerate(spots) if len(ranks)]
        fresh = [s for s in usable if s not in taken] or usable
        ranks = np.array([int(spots[s][0]) for s in fresh])
        if len(spots[fresh[0]]) > 1:
            worst = np.array([load[spots[s]].max(0) for s in fresh])
            left = np.array([room[spots[s]].min(0) for s in fresh])
        else:
            worst, left = load[ranks], room[ranks]
        short = np.maximum(instance.memory[t, o] - left, 0).sum(1)
        step = np.maximum(top, worst + own).sum(1)
        order = np.lexsort((np.array(fresh), worst.sum(1), step, short))
        return fresh[int(order[0])]


def _spread(instance: Instance, t: int, o: int) -> Ints:
    """[S] what a piece adds to a rank that holds it; its part, where a host's link is shared."""
    own = instance.cost[t, o].copy()
    if instance.shared.any() and instance.width[t, o] == 1:
        own[instance.shared] //= int(instance.host_sizes.max())
    return own
