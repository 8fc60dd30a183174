"""`Bottleneck`: the resource that takes the largest part of a step, and the time that ranks wait for each other.

    resource   one stage; or all stages between hosts, which share the network; or the fixed costs of collectives

Legend: S stages, R ranks. Times are whole picoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilerec.planner.search.instance import Ints

BALANCED = 0.05
"""Ranks are balanced if the slowest has at most this part more work than the mean."""
BETWEEN_HOSTS = " between hosts"
NETWORK, COLLECTIVES = "network between hosts", "collectives as such"


@dataclass(frozen=True)
class StepResource:
    """A part of the step.

    Args:
        ps: its time.
        share: its part of the step, from 0 to 1.
        stages: numbers of its stages; () for collectives.
    """

    name: str
    ps: int
    share: float
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bottleneck:
    """Breakdown of a step into resources, and its imbalance between ranks.

    Args:
        resources: the resources, longest time first.
        rank: the rank with the most work over all stages. above: its work above the mean, as a part of the mean.
        stage: number of the stage in which ranks wait longest for the slowest rank. stage_rank: the slowest rank there.
            stage_above: its time above the stage's mean, as a part of the mean.
        waiting: waiting time of the mean rank over all stages, as a part of the step.
    """

    resources: tuple[StepResource, ...]
    rank: int
    above: float
    stage: int
    stage_rank: int
    stage_above: float
    waiting: float

    @property
    def largest(self) -> StepResource:
        """The resource that takes the largest part of the step."""
        return self.resources[0]

    @property
    def balanced(self) -> bool:
        """True if no rank has much more work than the mean, over all stages."""
        return self.above <= BALANCED

    @property
    def waits(self) -> bool:
        """True if ranks wait for each other for more than `BALANCED` of the step."""
        return self.waiting > BALANCED


def bottleneck_of(stages: Sequence[str], load_ps: Ints, charge_ps: int, network_ps: Ints | None = None) -> Bottleneck:
    """Return the bottleneck for the given loads of all ranks.

    Args:
        stages: [S] names.
        load_ps: [R, S] time of each rank in each stage.
        charge_ps: fixed costs of collectives.
        network_ps: [R, S] part of `load_ps` on the ranks' own network cards; None: 0.
    """
    slowest, mean = load_ps.max(0, initial=0), load_ps.mean(0) if len(load_ps) else load_ps.sum(0)
    step = int(slowest.sum()) + charge_ps
    names = [NETWORK if name.endswith(BETWEEN_HOSTS) else name for name in stages]
    groups = {name: tuple(s for s, other in enumerate(names) if other == name) for name in names}
    time = {name: int(slowest[list(own)].sum()) for name, own in groups.items()}
    if network_ps is not None and network_ps.any():
        # Network time of each stage: that of its slowest rank.
        away = network_ps[load_ps.argmax(0), np.arange(len(stages))].tolist()
        time |= {name: time[name] - sum(away[s] for s in own) for name, own in groups.items()}
        time[NETWORK] = time.get(NETWORK, 0) + sum(away)
        groups.setdefault(NETWORK, ())
    found = [(name, ps, groups[name]) for name, ps in time.items()]
    found.append((COLLECTIVES, charge_ps, ()))
    resources = [
        StepResource(name, ps, ps / step if step else 0.0, own) for name, ps, own in found if ps or own or not stages
    ]
    resources.sort(key=lambda one: -one.ps)
    total = load_ps.sum(1)
    rank, stage = int(total.argmax()), int((slowest - mean).argmax()) if len(stages) else 0
    return Bottleneck(
        tuple(resources),
        rank,
        _above(float(total[rank]), float(total.mean())),
        stage,
        int(load_ps[:, stage].argmax()) if len(stages) else 0,
        _above(float(slowest[stage]), float(mean[stage])) if len(stages) else 0.0,
        float((slowest - mean).sum()) / step if step else 0.0,
    )


def _above(most: float, mean: float) -> float:
    return most / mean - 1.0 if mean else 0.0
