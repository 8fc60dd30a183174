"""From a request to the problem that the search solves: the options of all tables that constraints allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.colocation import merge_colocated
from tilerec.planner.cost.options import Problem, build
from tilerec.planner.pins import groups_of
from tilerec.planner.plan_price import work_with_sharding
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.instance import Instance, Ints
from tilerec.planner.table_limits import limits_of_tables
from tilerec.spec.plan import ParameterSharding


def build_problem(request: PlanRequest, pins: dict[str, ParameterSharding], offload: bool = False) -> Problem:
    """Return the request's tables with their options, and the memory in use before the search.

    `offload` as in `limits_of_tables`.
    """
    topology = request.topology
    reserved = np.zeros((topology.world_size, 2), np.int64)
    reserved[:, 1 if topology.compute_device == "cpu" else 0] = request.reserved_bytes()
    tilings = {key: sharding.tiling for key, sharding in pins.items() if sharding.tiling is not None}
    works = [work_with_sharding(work, pins[work.name]) if work.name in pins else work for work in request.works()]
    return build(
        works,
        topology,
        limits_of_tables(request, pins, offload),
        tilings,
        reserved=reserved,
        together=groups_of(request, pins),
    )


def merged_instance(
    request: PlanRequest, pins: Mapping[str, ParameterSharding], instance: Instance
) -> tuple[Instance, Ints]:
    """Return an instance in which co-located tables are one table, and the index [T] of each table in it."""
    return merge_colocated(instance, groups_of(request, pins))


def searched_instance(
    request: PlanRequest, pins: Mapping[str, ParameterSharding], instance: Instance
) -> tuple[Instance, Ints]:
    """Return `merged_instance` without the options that the search must not use."""
    return merged_instance(request, pins, _with_restrictions(request, instance))


def _with_restrictions(request: PlanRequest, instance: Instance) -> Instance:
    """Apply the restriction that options do not contain: `max_ranks`."""
    most = {key: c.max_ranks for key, c in request.constraints.items() if c.max_ranks is not None}
    if not most:
        return instance
    width = instance.width.copy()
    held = np.minimum(instance.width * instance.pieces, instance.ranks)
    for t, name in enumerate(instance.names):
        if name in most:
            width[t, held[t] > most[name]] = 0
            if not width[t].any():
                raise ConfigError(
                    f"Table '{name}': max_ranks={most[name]} and its other constraints contradict each other: all "
                    "splits that those allow use more ranks. Raise max_ranks, or allow table_wise."
                )
    return replace(instance, width=width)
