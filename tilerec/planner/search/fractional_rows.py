"""An instance as if rows that are split over a host lay where its ranks have time for them.

Such rows flow (uneven_rows.py). So the load that all ranks of the host bear together counts, and each rank's own work.
Packing and exchanging even splits sees neither: a rank that bears much beside its even part looks full,
though its part can become small. Here each stage is two: what a rank bears without those rows, and the mean of its host
with them, judged as a network link is, which the ranks of a host share too.

A stage and its mean are twins: the step waits for the larger of the two, so both are judged by one level, and the
larger one counts in the objective. Places found so are worth what `flow` makes of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilerec.planner.search.instance import Instance
from tilerec.planner.search.relaxed import Relaxed


def poured(instance: Instance) -> Relaxed:
    """`instance` with a stage more, of means, for each one in which rows split over hosts (or all ranks) take time."""
    fluid = (instance.divisible & (instance.width > 1))[:, :, None]
    own = np.flatnonzero(~instance.shared & ((instance.cost - instance.fixed) * fluid > 0).any((0, 1)))
    cost = instance.cost.copy()
    cost[:, :, own] = np.where(fluid, instance.fixed[:, :, own], cost[:, :, own])
    cost = np.concatenate([cost, instance.cost[:, :, own]], 2)
    both = replace(
        instance,
        cost=cost,
        home=np.concatenate([instance.home, instance.home[:, :, own]], 2),
        shared=np.concatenate([instance.shared, np.ones(len(own), np.bool_)]),
        slow=np.concatenate([instance.slow, instance.slow[:, own]], 1),
        reach=np.concatenate([instance.reach, instance.reach[:, own]], 1),
        phase=np.concatenate([instance.phase, instance.phase[own]]),
        base_cost=np.concatenate([instance.base_cost, instance.base_cost[:, own]], 1),
        divisible=np.zeros_like(instance.divisible),
        fixed=np.zeros_like(cost),
    )
    return Relaxed(both)
