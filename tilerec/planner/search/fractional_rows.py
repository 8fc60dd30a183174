"""`fractional_view`: an instance for packing, in which rows that are split over a host can move between its ranks.

Uneven shares of rows are only computed at the end (uneven_rows.py). Packing and exchanges assume even shares, and a
rank with much other work then looks full, although its share could become small.

The view replaces each stage that contains such rows by two stages:

    own     the load of a rank without those rows
    mean    the mean load of its host, with those rows; packing treats it like a network link that the host's ranks
            share

Both belong to one phase: the step waits for the longer one, so both are judged by one level, and the objective counts
the larger one. A packing of the view costs about as much as `flow` can make of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilerec.planner.search.instance import Instance
from tilerec.planner.search.relaxed import Relaxed


def fractional_view(instance: Instance) -> Relaxed:
    """Return the view of an instance: one more stage for each stage with rows split over hosts, or over all ranks."""
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
