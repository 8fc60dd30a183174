"""`price_plan`: predicted time of a step and memory of each rank, for any plan, made by the planner or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.price import Price, price
from tilerec.planner.cost.workload import TableWork, Workload
from tilerec.planner.report.time_text import time_text
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.instance import PICO, Ints
from tilerec.sharding.strategies import complete
from tilerec.spec.plan import HOST_KERNELS, EmbeddingComputeKernel, ParameterSharding, ShardingPlan
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.tile import Tiling


@dataclass(frozen=True, eq=False)
class PlanPrice:
    """Predicted time and memory of a plan (docs/planner-cost.md).

    Legend: R ranks, S stages.

    Args:
        price: price of all tables together, without reserved memory.
        reserved: [R, 2] reserved bytes of device and host memory.
        cap: [R, 2] bytes of device and host memory that each rank has.
        shardings: sharding of each table, by key.
    """

    price: Price
    reserved: Ints
    cap: Ints
    shardings: Mapping[str, ParameterSharding]

    @property
    def seconds(self) -> float:
        """Seconds of a step: the slowest rank's seconds, summed over stages, plus fixed costs of collectives."""
        return self.cost_ps / PICO

    @property
    def stages(self) -> dict[str, Floats]:
        """[R] seconds of each stage on each rank."""
        return self.price.stages

    @property
    def parts(self) -> Mapping[str, Floats]:
        """[R] seconds of each part of a step on each rank: "lookup", "combine", …"""
        return self.price.parts

    @property
    def memory(self) -> Ints:
        """[R, 2] bytes of device and host memory in use, reserved memory included."""
        return self.price.memory + self.reserved

    @property
    def over(self) -> Ints:
        """[R, 2] bytes above the cap; 0 where the plan fits."""
        return np.maximum(self.memory - self.cap, 0)

    def __str__(self) -> str:
        """Return a few lines: the step, its stages with their slowest ranks, and the fullest memory."""
        lines = [f"{time_text(self.cost_ps)} a step, as predicted"]
        for name, seconds in self.stages.items():
            rank = int(seconds.argmax())
            lines.append(
                f"  {name:<24} {time_text(round(float(seconds[rank]) * PICO)):>8}  slowest rank {rank}, "
                f"mean {time_text(round(float(seconds.mean()) * PICO))}"
            )
        lines.append(f"  {'collectives as such':<24} {time_text(self.charge_ps):>8}")
        rank, tier = int(self.memory[:, self.price.tier].argmax()), self.price.tier
        held, cap = int(self.memory[rank, tier]), int(self.cap[rank, tier])
        lines.append(f"memory: {bytes_text(held)} of {bytes_text(cap)} on rank {rank}, the fullest")
        over = np.flatnonzero(self.over.any(1))
        if len(over):
            most = bytes_text(int(self.over.max()))
            lines.append(f"DOES NOT FIT: {len(over)} ranks are over their memory, by up to {most}")
        return "\n".join(lines)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return self.price.names

    @property
    def load_ps(self) -> Ints:
        """[R, S] picoseconds of each rank in each stage."""
        stages = self.price.stages
        seconds = np.stack([stages[name] for name in self.stage_names], axis=1)
        return np.rint(seconds * PICO).astype(np.int64)

    @property
    def network_ps(self) -> Ints:
        """[R, S] part of `load_ps` on a rank's own network card; cards that ranks share are separate stages."""
        found = np.zeros((len(self.cap), len(self.stage_names)))
        for name, seconds in self.price.network.items():
            if name not in self.stage_names:
                found[:, self.stage_names.index(self.price.stage_of[name])] += seconds
        return np.rint(found * PICO).astype(np.int64)

    @property
    def charge_ps(self) -> int:
        """Fixed costs of the collectives of a step, in picoseconds."""
        return round(self.price.calls * PICO)

    @property
    def cost_ps(self) -> int:
        """Picoseconds of a step."""
        return int(self.load_ps.max(0).sum()) + self.charge_ps


def price_plan(request: PlanRequest, plan: ShardingPlan) -> PlanPrice:
    """Return the price of a plan, which reports state and searches minimize.

    Args:
        request: tables, topology and batch, from `EmbeddingShardingPlanner.request`. Its constraints supply facts about
            ids (pooling factors, skew); its constraints on shardings have no effect.
        plan: a sharding of each table in the request.

    Raises:
        ConfigError: the plan lacks a table, or was made for another number of ranks or for tables of another size.
    """
    topology = request.topology
    if plan.world_size not in (0, None, topology.world_size):
        raise ConfigError(
            f"price_plan: got a plan for {plan.world_size} ranks; expected one for the topology's "
            f"{topology.world_size}. Use the topology of the plan."
        )
    shardings: dict[str, ParameterSharding] = {}
    for table in request.tables:
        path, name = table.names[0]
        try:
            sharding = plan.plan[path][name]
        except KeyError:
            raise ConfigError(
                f"price_plan: got a plan without table '{name}' of module '{path}'; expected one for all "
                f"{len(request.tables)} tables of the request. Add it, or plan again."
            ) from None
        shardings[table.key] = _with_tiling(request, table.key, sharding)
    return priced(request, shardings)


def _with_tiling(request: PlanRequest, key: str, sharding: ParameterSharding) -> ParameterSharding:
    """Return the sharding with a tiling of the table, computed if it has none, and its hot rows in the tiling.

    Raises:
        ConfigError: its tiling is for a table of another size.
    """
    table = request.by_key[key]
    tiling = sharding.tiling
    if tiling is None:
        return complete(sharding, key, table.rows, table.dim, request.topology)
    if (tiling.rows, tiling.dim) != (table.rows, table.dim):
        raise ConfigError(
            f"Table '{key}': got a sharding of {tiling.rows} x {tiling.dim}; expected {table.rows} x {table.dim}. "
            "Plan again, or use the tables that the plan was made for."
        )
    if sharding.hot is None or (tiling.head is not None and tiling.head.hot == sharding.hot):
        return sharding
    return complete(sharding, key, table.rows, table.dim, request.topology)


def priced(
    request: PlanRequest, shardings: Mapping[str, ParameterSharding], known: Model | None = None
) -> PlanPrice:  # fmt: skip
    """Return the price of the given shardings, by `PlannedTable.key`. Each must have a tiling.

    Args:
        known: a model of all tables of the request, whose counts of rows are used again.
    """
    works, tilings = list[TableWork](), list[Tiling]()
    for work in request.works():
        sharding = shardings[work.name]
        assert sharding.tiling is not None
        works.append(work_with_sharding(work, sharding))
        tilings.append(sharding.tiling)
    model = Model(Workload(works), request.topology) if known is None else known.with_tables(works)
    found = price(tilings, model)
    reserved = np.zeros((request.topology.world_size, 2), np.int64)
    reserved[:, found.tier] = request.reserved_bytes()
    return PlanPrice(found, reserved, np.array(request.topology.caps, np.int64), shardings)


def work_with_sharding(work: TableWork, sharding: ParameterSharding) -> TableWork:
    """Return the table's work in a step under a sharding.

    The sharding determines whether rows are in host memory or in files, and whether hosts sum rows before they send
    them.
    """
    in_host, files = sharding.kernel in HOST_KERNELS, sharding.kernel is EmbeddingComputeKernel.KEY_VALUE
    params = sharding.cache if in_host else None
    known = sharding.ids_per_bag
    load_factor = work.load_factor if params is None else params.load_factor
    sums = None if work.each_id else known is None or known > 1
    if (in_host, load_factor, sums, files) == (work.cached, work.load_factor, work.sums_in_hosts, work.files):
        return work
    return replace(work, cached=in_host, load_factor=load_factor, sums_in_hosts=sums, files=files)
