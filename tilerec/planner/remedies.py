"""Remedies: changes of a request without a plan, each listed only after a plan for it was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.constraints import FREE_PLACEMENT, ParameterConstraints
from tilerec.planner.cost.workload import Workload
from tilerec.planner.decision import Decision, decide
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.work import Work
from tilerec.planner.shortage import NAMES_SHOWN, Shortage
from tilerec.spec.cache import CacheParams
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import HOST_KERNELS, EmbeddingComputeKernel, ShardingType
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.table import DataType
from tilerec.spec.topology import MOST_BYTES, Topology

PLANS_PER_REMEDY = 10  # plans tried for one remedy
REMEDY_WORK = 900_000_000  # units of work for all remedies together
WORK_PER_TABLE = 40_000  # units of work per table, to build one problem
MOST_TIMES_RANKS = 64  # a remedy proposes at most MOST_TIMES_RANKS times the present number of ranks
RANKS_PER_HOST = 8  # ranks assumed to fit into one host


@dataclass(frozen=True, eq=False)
class Remedy:
    """A change of the request for which a plan was found. `text`: its description. `request`: the changed request."""

    text: str
    request: PlanRequest


def remedies_for(shortage: Shortage) -> list[Remedy]:
    """Return the remedies that were found, at most one of each kind."""
    return list(_RemedySearch(shortage).found())


class _RemedySearch:
    """Tries one kind of change after the other, each with an equal part of the remaining work."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage, self.decision, self.request = shortage, shortage.decision, shortage.request
        self.instance, self.topology, self.tier = shortage.instance, shortage.topology, shortage.tier
        self.caps, self.cap, self.taken, self.least = (
            shortage.caps, shortage.cap, shortage.taken, shortage.least,
        )  # fmt: skip
        self.tries = PLANS_PER_REMEDY
        self.work = Work(REMEDY_WORK)

    def found(self) -> Iterator[Remedy]:
        ways = (
            self._more_ranks, self._larger_cap, self._host_memory, self._attached, self._bf16, self._other_types,
            self._unpinned,
        )  # fmt: skip
        whole = Work(REMEDY_WORK)
        for i, way in enumerate(ways):
            self.work = whole.part(whole.left // (len(ways) - i))
            found = way()
            if found is not None:
                yield found

    def _first(self, candidates: Iterable[tuple[str, PlanRequest]]) -> Remedy | None:
        """Return the first candidate with a plan, of at most `tries`."""
        for _, (text, request) in zip(range(self.tries), candidates, strict=False):
            if self._decided(request) is not None:
                return Remedy(text, request)
        return None

    def _decided(self, request: PlanRequest) -> Decision | None:
        """Return a decision with a plan; None if there is none, or if no work is left."""
        if self.work.over:
            return None
        self.work.spend(WORK_PER_TABLE * len(request.tables))
        try:
            found = decide(request, quick=self.work)
        except ConfigError:
            return None
        return None if found.priced is None else found

    def _more_ranks(self) -> Remedy | None:
        return self._first(self._worlds())

    def _worlds(self) -> Iterator[tuple[str, PlanRequest]]:
        topology = self.topology
        free = self.cap - int(self.taken.sum()) // topology.world_size
        if free <= 0:
            return
        wanted = max(topology.world_size + 1, -(-int(self.least.sum()) // free))
        if wanted > MOST_TIMES_RANKS * topology.world_size:
            return
        size = max(len(host) for host in topology.host_ranks)
        if topology.host_count == 1 and size < RANKS_PER_HOST:
            for ranks in range(min(wanted, RANKS_PER_HOST), RANKS_PER_HOST + 1):
                if ranks > topology.world_size:
                    yield (
                        f"{ranks} ranks instead of {topology.world_size}",
                        replace(self.request, topology=_with_more_ranks(topology, (), ranks)),
                    )
        hosts = max(1, -(-(wanted - topology.world_size) // size))
        for more in sorted({hosts, hosts + 1, -(-hosts * 5 // 4), -(-hosts * 3 // 2), 2 * hosts, 4 * hosts}):
            yield (
                f"{more} host{'s' * (more != 1)} of {size} rank{'s' * (size != 1)} more ({topology.host_count + more} "
                "in all)",
                replace(self.request, topology=_with_more_ranks(topology, (size,) * more, topology.world_size)),
            )

    def _larger_cap(self) -> Remedy | None:
        """Find the least cap with a plan, by bisection with at most `tries` plans.

        Memory that is reserved as a part of the cap grows with the cap.
        """
        request, proof = self.request, self.decision.solution.proof
        part = np.array(request.reserved_bytes(), np.int64) - request.reserved
        if self.tier != self.shortage.main:
            part = np.zeros_like(part)
        taken = self.taken - part
        wanted = max(-(-(self.shortage.need - int(part.sum())) // self.topology.world_size), int(taken.max()))
        if proof is not None and proof.table is not None:
            wanted = max(wanted, int((self.caps - part).max()) + proof.short)
        low = max(int(self.caps.min()), math.floor(wanted / (1.0 - request.reserved_part)) - 1)
        tries, high, step = self.tries, 0, 1
        while tries and not high:
            cap = _round_up_to_text(low + max(1, low * step // 100))
            if cap >= MOST_BYTES:
                break
            if self._decided(self._with_cap(cap)) is not None:
                high = cap
            else:
                low, step = cap, min(4 * step, 100)
            tries -= 1
        while tries and high - low > max(1, high // 50):
            middle = _round_up_to_text((low + high) // 2)
            if middle >= high:
                break
            if self._decided(self._with_cap(middle)) is not None:
                high = middle
            else:
                low = middle
            tries -= 1
        if high:
            name = "ddr_cap" if self.tier == 1 else "hbm_cap"
            text = f"{name} of {bytes_text(high)} a rank instead of {self.shortage.cap_text()}"
            if int(self.caps.min()) < self.cap:
                text = f"{name} of {bytes_text(high)} at least on every rank; they have {self.shortage.cap_text()}"
            return Remedy(text, self._with_cap(high))
        if request.reserved_bytes()[0] > 0.3 * self.cap:
            free = replace(request, reserved=0, reserved_part=0.0, reserved_batches=0)
            return self._first([("nothing reserved (storage_reservation)", free)])
        return None

    def _with_cap(self, cap: int) -> PlanRequest:
        name = "ddr_cap" if self.tier == 1 else "hbm_cap"
        changes: dict[str, Any] = {name: cap, f"{name}s": None}
        if int(self.caps.min()) < self.cap:
            changes = {name: None, f"{name}s": [max(cap, own) for own in self.caps.tolist()]}
        return replace(self.request, topology=replace(self.topology, **changes))

    def _host_memory(self) -> Remedy | None:
        """Try rows in host memory behind caches: without the constraints that forbid it, or with more host memory."""
        request, topology = self.request, self.topology
        if topology.compute_device == "cpu":
            return None
        bound = [
            table.key
            for table in request.tables
            if table.optimizer is not None and _must_be_on_device(request.limits_of(table.key))
        ]
        freed = request.with_constraints(bound, enforce_hbm=None, compute_kernels=None)
        some = ", ".join(f"'{name}'" for name in bound[:NAMES_SHOWN]) + ", …" * (len(bound) > NAMES_SHOWN)

        limits = {table.key: freed.limits_of(table.key) for table in request.tables}
        own = [key for key, c in limits.items() if c.cache_params is None and c.sharding is None]

        def candidates() -> Iterator[tuple[str, PlanRequest]]:
            if bound:
                yield (
                    f"rows in host memory behind a cache for {some}, without enforce_hbm and compute_kernels",
                    freed,
                )
            for factor in (0.1, 0.05, 0.02, 0.01):
                if (topology.ddr_cap or 0) > 0:
                    yield (
                        f"smaller caches for tables in host memory: cache_params=CacheParams(load_factor={factor})",
                        freed.with_constraints(own, cache_params=CacheParams(load_factor=factor)),
                    )
            work = Workload(request.works())
            size = work.rows * (work.dim * (work.element + work.cell_state) + work.row_state)
            each = int(size.sum()) // topology.world_size
            for cap in (
                _round_up_to_text(each * 21 // 20),
                _round_up_to_text(each * 3 // 2),
                _round_up_to_text(int(size.max()) + each),
            ):
                if (topology.ddr_cap or 0) < cap < MOST_BYTES:
                    larger = replace(topology, ddr_cap=cap, ddr_caps=None)
                    yield (
                        f"ddr_cap of {bytes_text(cap)} a rank instead of {bytes_text(topology.ddr_cap or 0)}, for rows "
                        "in host memory behind caches",
                        replace(freed, topology=larger),
                    )

        return self._first(candidates())

    def _attached(self) -> Remedy | None:
        """Try attached optimizers: a table without one has a gradient as large as the table."""
        request = self.request
        bare = [
            table.key
            for table in request.tables
            if table.trained and table.optimizer is None and not request.limits_of(table.key).only_dense()
        ]
        if not bare:
            return None
        text = (
            "an optimizer that updates in the backward pass (apply_optimizer_in_backward, or a sharder's) and has no "
            f"state per cell, such as RowWiseAdagrad, for {_named(bare)}: without one, gradients are as large as tables"
        )
        return self._first([(text, request.with_tables(bare, optimizer=RowWiseAdagrad()))])

    def _bf16(self) -> Remedy | None:
        names, request = self.instance.names, self.request
        order = sorted(range(len(names)), key=lambda t: (-int(self.least[t]), names[t]))
        wide = [names[t] for t in order if request.by_key[names[t]].data_type in (DataType.FP32, DataType.FP64)]

        def fits(count: int) -> bool:
            return self._decided(request.with_tables(wide[:count], data_type=DataType.BF16)) is not None

        if not wide or not fits(len(wide)):
            return None
        count = least_fitting(len(wide), fits, self.tries)
        some = wide[:count]
        text = f"bf16 rows (data_type) for {_named(some)}"
        return Remedy(text, request.with_tables(some, data_type=DataType.BF16))

    def _other_types(self) -> Remedy | None:
        order = {name: int(self.least[t]) for t, name in enumerate(self.instance.names)}
        bound = [
            key
            for key, limits in self.request.constraints.items()
            if key in order and any(getattr(limits, field) for field in _RESTRICT)
        ]
        bound.sort(key=lambda key: (-order[key], key))

        for key in bound[: max(1, self.tries - 1)]:
            request = self.request.with_constraints([key], **_FREE)
            found = self._decided(request)
            if found is not None:
                kind, names = found.shardings()[key].kind, _restricting(self.request.constraints[key])
                if kind in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
                    return Remedy(f"a split by rows of '{key}', which {names} rule out", request)
                return Remedy(f"'{key}' as {kind.value}, without its {names}", request)
        if len(bound) < 2:
            return None
        some = ", ".join(f"'{key}'" for key in bound[:NAMES_SHOWN]) + ", …" * (len(bound) > NAMES_SHOWN)
        text = f"no restriction of sharding types and ranks for {some}"
        return self._first([(text, self.request.with_constraints(bound, **_FREE))])

    def _unpinned(self) -> Remedy | None:
        keys = list(self.decision.pins)
        if not keys:
            return None
        over = [key for key, _ in self.shortage.pinned_on(int(self.taken.argmax()))]

        def candidates() -> Iterator[tuple[str, PlanRequest]]:
            for key in over[: max(1, self.tries - 1)]:
                yield (
                    f"'{key}' left to the planner instead of pinned",
                    self.request.with_constraints([key], **_FREE),
                )
            yield "no table pinned", self.request.with_constraints(keys, **_FREE)

        return self._first(candidates())


_FREE = {**FREE_PLACEMENT, "sharding": None}
_RESTRICT = ("sharding_types", "forbidden_types", "max_ranks", "ranks", "hosts")


def _must_be_on_device(limits: ParameterConstraints) -> bool:
    if limits.sharding is not None:
        return False
    kernels = limits.kernels_allowed()
    updating = [kernel for kernel in kernels if kernel is not EmbeddingComputeKernel.DENSE]
    return bool(limits.enforce_hbm) or (bool(updating) and not set(HOST_KERNELS) & set(kernels))


def _restricting(limits: ParameterConstraints) -> str:
    return " and ".join(name for name in _RESTRICT if getattr(limits, name))


def _with_more_ranks(topology: Topology, more_hosts: Sequence[int], ranks: int) -> Topology:
    """Return the topology with `ranks` ranks on its only host, or with additional hosts."""
    hosts = [list(host) for host in topology.host_ranks]
    if len(hosts) == 1:
        hosts[0] += range(topology.world_size, ranks)
    last = ranks
    for size in more_hosts:
        hosts.append(list(range(last, last + size)))
        last += size
    more = (0,) * (last - topology.world_size)
    caps: dict[str, Any] = {}
    for name in ("hbm_cap", "ddr_cap"):
        own = getattr(topology, f"{name}s")
        if own is not None:  # new ranks have as much memory as the largest
            caps[f"{name}s"] = (*own, *(max(own) for _ in more))
    return replace(topology, world_size=last, hosts=hosts, local_world_size=None, **caps)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:NAMES_SHOWN]) + more


def least_fitting(most: int, fits: Callable[[int], bool], tries: int) -> int:
    """Return the least number in 1 to `most` for which `fits` is true, by bisection.

    `fits` must be monotonic and true for `most`. After `tries` calls, the best number so far is returned.
    """
    low, high = 1, most
    for _ in range(tries):
        if low == high:
            break
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _round_up_to_text(size: int) -> int:
    """Round `size` up to a number of bytes whose text (such as `"1.3 GiB"`) is exact."""
    unit = 1
    while unit << 10 <= size:
        unit <<= 10
    return size if unit == 1 else -(-size * 10 // unit) * unit // 10
