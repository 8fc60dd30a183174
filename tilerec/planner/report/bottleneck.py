"""`Bottleneck`: what takes most of a step, and how much of it is ranks waiting for each other.

    resource   a stage; the stages between hosts together, since they share the network; collectives as such

Legend: S stages, R ranks. Times are whole picoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilerec.planner.search.instance import Ints

BALANCED = 0.05
"""Ranks are balanced where the slowest has at most this part more to do than the mean."""
BETWEEN_HOSTS = " between hosts"
NETWORK, COLLECTIVES = "network between hosts", "collectives as such"


@dataclass(frozen=True)
class Resource:
    """A part of the step. ps: its time. share: of the step, from 0 to 1. stages: their numbers; () for collectives."""

    name: str
    ps: int
    share: float
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bottleneck:
    """Where a step goes.

    Args:
        resources: the longest first.
        rank: the one with the most to do in all stages. above: by which part of the mean.
        stage: the number of the stage in which ranks wait longest for the slowest. stage_rank: the slowest there.
            stage_above: by which part of the stage's mean.
        waiting: the part of the step that the mean rank waits in, over all stages.
    """

    resources: tuple[Resource, ...]
    rank: int
    above: float
    stage: int
    stage_rank: int
    stage_above: float
    waiting: float

    @property
    def largest(self) -> Resource:
        """The bottleneck."""
        return self.resources[0]

    @property
    def balanced(self) -> bool:
        """Whether no rank has much more to do than the mean, in all stages together."""
        return self.above <= BALANCED

    @property
    def waits(self) -> bool:
        """Whether ranks wait for each other for more than a small part of the step."""
        return self.waiting > BALANCED


def bottleneck_of(
    stages: Sequence[str], load_ps: Ints, charge_ps: int, network_ps: Ints | None = None
) -> Bottleneck:
    """Read off the loads of all ranks.

    Args:
        stages: [S] names. load_ps: [R, S]. charge_ps: of collectives. network_ps: [R, S] of the loads, what is on the
            ranks' own network cards; None: nothing.
    """
    slowest, mean = load_ps.max(0, initial=0), load_ps.mean(0) if len(load_ps) else load_ps.sum(0)
    step = int(slowest.sum()) + charge_ps
    names = [NETWORK if name.endswith(BETWEEN_HOSTS) else name for name in stages]
    groups = {name: tuple(s for s, other in enumerate(names) if other == name) for name in names}
    time = {name: int(slowest[list(own)].sum()) for name, own in groups.items()}
    if network_ps is not None and network_ps.any():
        # Of each stage, as much as its slowest rank spends there.
        away = network_ps[load_ps.argmax(0), np.arange(len(stages))].tolist()
        time |= {name: time[name] - sum(away[s] for s in own) for name, own in groups.items()}
        time[NETWORK] = time.get(NETWORK, 0) + sum(away)
        groups.setdefault(NETWORK, ())
    found = [(name, ps, groups[name]) for name, ps in time.items()]
    found.append((COLLECTIVES, charge_ps, ()))
    resources = [
        Resource(name, ps, ps / step if step else 0.0, own)
        for name, ps, own in found
        if ps or own or not stages
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
