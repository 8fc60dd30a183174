"""`Rebalanced`: whether a move pays, from the proposals for all parts of a model.

pays   if   (before - after) x horizon  >  move      and      before - after  >=  least_gain x before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilerec.parallel.resharding.measured_load import Load
from tilerec.parallel.resharding.move_report import Resharded
from tilerec.parallel.resharding.rebalance_proposal import Proposal
from tilerec.spec.plan import ShardingPlan


@dataclass(frozen=True)
class Rebalanced:
    """Decision of `rebalance`, and report of its move; equal on every rank.

    Attributes:
        load: the load that the decision is based on.
        before_s, after_s: predicted seconds of the tables' part of a step, under the current plan and under the
            proposed one.
        move_s, move_bytes: predicted seconds of the move, and bytes sent between ranks.
        horizon: number of steps in which the move has to pay.
        pays: True if the gain pays for the move and is at least `least_gain`.
        why: the reason, as text.
        plan: the proposed plan.
        moved: report of the move; None if there was none.
    """

    load: Load
    before_s: float
    after_s: float
    move_s: float
    move_bytes: int
    horizon: int
    pays: bool
    why: str
    plan: ShardingPlan
    moved: Resharded | None = None

    @property
    def gain_s(self) -> float:
        """Predicted seconds saved per step."""
        return self.before_s - self.after_s

    @property
    def pays_after(self) -> float:
        """Number of steps after which the move has paid; infinite without a gain."""
        return self.move_s / self.gain_s if self.gain_s > 0 else float("inf")

    def __str__(self) -> str:
        lines = [
            f"load    {self.load}",
            f"step    {_milliseconds(self.before_s)} now, {_milliseconds(self.after_s)} proposed",
            f"move    {self.move_bytes:,} bytes, {_milliseconds(self.move_s)}",
            f"so      {self.why}",
        ]
        return "\n".join([*lines, f"done    {self.moved}"] if self.moved is not None else lines)


def decide(
    proposals: Sequence[Proposal], load: Load, horizon: int, least_gain: float, step_seconds: float | None
) -> Rebalanced:
    """Return the decision for all parts. Parts of a step run one after the other, so their seconds are added.

    If there are several parts, those without a gain keep their plan.
    """
    if len(proposals) > 1:
        proposals = [
            p if p.after_s < p.before_s else p._replace(after_s=p.before_s, move_s=0.0, move_bytes=0, plan=p.present)
            for p in proposals
        ]
    before, after = sum(p.before_s for p in proposals), sum(p.after_s for p in proposals)
    scale = step_seconds / before if step_seconds and before else 1.0
    plan = proposals[0].plan
    if len(proposals) > 1:
        sizes = {p.plan.world_size for p in proposals}
        paths = {path: tables for p in proposals for path, tables in p.plan.plan.items()}
        plan = ShardingPlan(paths, sizes.pop() if len(sizes) == 1 else None)
    found = Rebalanced(
        load,
        scale * before,
        scale * after,
        sum(p.move_s for p in proposals),
        sum(p.move_bytes for p in proposals),
        horizon,
        False,
        "nothing was read since the last call",
        plan,
    )
    if not before:
        return found
    pays, why = _verdict(found, least_gain, any(p.moves for p in proposals))
    return replace(found, pays=pays, why=why)


def _verdict(found: Rebalanced, least_gain: float, moves: bool) -> tuple[bool, str]:
    """Return whether the move pays, and the reason."""
    gain = found.gain_s / found.before_s if found.before_s else 0.0
    if not moves:
        return False, "the planner found no better plan than the present one for this load"
    if gain < least_gain or found.gain_s <= 0:
        return False, f"a step would gain {gain:.1%}, less than least_gain, {least_gain:.1%}"
    after = found.pays_after
    if after >= found.horizon:
        return False, (
            f"a step would gain {gain:.1%}, but the move would pay after {after:,.0f} steps, more than the horizon of "
            f"{found.horizon:,}"
        )
    steps = max(1, round(after))
    return True, f"a step gains {gain:.1%}, and the move pays after {steps:,} of {found.horizon:,} steps"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms"
