"""The ways to cut every table as an `Instance`, and the way back from a solution to tilings.

Nouns
  option   a way to cut a table (`ways.py`): a column of the instance, the same for all tables
  group    row pieces on one host, whose rows are added there before they cross to another

Everything is computed for one option of all tables at a time, by the formulas of `Model`; the same that `price` uses
for tilings that are known. What an instance cannot see (which ranks share a host with which) is taken as on average.

Legend: T tables, O options, S stages, W ranks, H hosts, P present bags, N ids, q share of a table's traffic.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.cost.cuts import even_pieces, row_cuts
from tilerec.planner.cost.model import HOST, KEY_BYTES, NETWORK_STAGES, STAGES, Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.price import Price, price
from tilerec.planner.cost.realise import sharding_of
from tilerec.planner.cost.ways import MIN_PARTITION, Limits, Option, Way, enumerate_options, is_of
from tilerec.planner.cost.workload import TableWork, Workload
from tilerec.planner.search.instance import NO_CAP, Bools, Instance, Ints
from tilerec.spec.plan import ParameterSharding, ShardingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

PICO = 1e12
CHARGES = ("exchange", "replicas", "hosts", "row sums", "partly filled")
_MOST = 1 << 52


@dataclass(frozen=True, eq=False)
class Problem:
    """An instance, and what its numbers stand for. `tables`: those that are not pinned, in the instance's order."""

    model: Model
    tables: tuple[TableWork, ...]
    options: tuple[Option, ...]
    instance: Instance
    stages: tuple[str, ...]
    charges: tuple[str, ...]

    def sharding(
        self, table: int, option: int, places: Sequence[int], shares: Ints | None = None
    ) -> ParameterSharding:
        """What a table's part of a solution is in the plan: sharding type, ranks and tiling.

        Args:
            places: ranks, or hosts, of the pieces; () for all ranks.
            shares: of an uneven split by rows, in units of 1 / SHARE.
        """
        model = self.model
        return sharding_of(model.workload, table, self.options[option], places, shares, model.topology)


def build(
    tables: Sequence[TableWork],
    topology: Topology,
    limits: Mapping[str, Limits] | None = None,
    pinned: Mapping[str, Tiling] | None = None,
    *,
    reserved: Ints | None = None,
    pipeline_depth: int = 1,
    min_partition: int = MIN_PARTITION,
) -> Problem:
    """Everything a search has to know.

    Args:
        tables: of the model; different names.
        limits: by table name.
        pinned: tables whose tilings are given: their cost and memory are base loads.
        reserved: [W, 2] bytes that are taken already, in each memory tier.
        pipeline_depth: batches whose ids are under way at once, beside the one that is computed.
        min_partition: of tables without limits of their own.

    Raises:
        ConfigError: limits or pins name a table that is not there, or limits leave no option.
    """
    limits, pinned = dict(limits or {}), dict(pinned or {})
    names = {t.name for t in tables}
    for what, given in (("limits", limits), ("pins", pinned)):
        strange = sorted(set(given) - names)
        if strange:
            raise ConfigError(f"Planner: {what} name {strange[:8]}, which is no table of the model.")
    free = tuple(t for t in tables if t.name not in pinned)
    fixed = [t for t in tables if t.name in pinned]
    model = Model(Workload(free), topology, pipeline_depth, beside=Workload(fixed) if fixed else None)
    builder = _Builder(model, limits, min_partition)
    return builder.problem(fixed, pinned, reserved)


class _Builder:
    def __init__(self, model: Model, limits: Mapping[str, Limits], min_partition: int) -> None:
        self.model, self.work, self.topology = model, model.workload, model.topology
        self.limits, self.least = limits, min_partition
        self.ranks, self.hosts = model.ranks, self.topology.host_count
        cached = any(limit.cached for _, limit in self._limited())
        self.options = enumerate_options(self.topology, self.work.dim.tolist(), cached)
        there = self._allowed()
        # Columns that no table can use only cost memory.
        kept = np.flatnonzero(there.any(0)).tolist()
        self.options = tuple(self.options[o] for o in kept)
        self.there = there[:, kept]
        self.on_host = self.ranks / self.hosts
        self.stages = STAGES + (NETWORK_STAGES if self.hosts > 1 else ())
        shape = (len(self.work.names), len(self.options), len(self.stages))
        self.cost = np.zeros(shape, np.int64)
        self.home = np.zeros(shape, np.int64)
        self.memory = np.zeros((*shape[:2], 2), np.int64)
        self.uses = np.zeros((*shape[:2], len(CHARGES)), np.bool_)
        self.width = np.zeros(shape[:2], np.int64)
        self.pieces = np.ones(shape[:2], np.int64)
        self.divisible = np.zeros(shape[:2], np.bool_)
        self.fixed = np.zeros(shape, np.int64)
        work = self.work
        self.bags, self.all_ids, self.lengths = work.present(np.ones(len(work.names)))
        self.output = work.per_table(work.bags) * work.dim * float(work.wide)
        self.part_filled = np.zeros(len(work.names), np.bool_)
        self.part_filled[work.table[work.ids_per_bag < 1.0]] = True
        self.weighted = np.zeros(len(work.names), np.float64)
        self.weighted[work.table[work.weighted]] = 1.0
        self.features = work.per_table(np.ones(len(work.bags)))

    def problem(
        self, fixed: Sequence[TableWork], pinned: Mapping[str, Tiling], reserved: Ints | None
    ) -> Problem:
        there = self.there
        for o, option in enumerate(self.options):
            tables = np.flatnonzero(there[:, o])
            if len(tables):
                self.width[tables, o] = option.width
                self.pieces[tables, o] = option.pieces
                if option.way is Way.COPIES:
                    self._copies(o, tables)
                else:
                    self._pieces(o, option, tables)
        model, topology = self.model, self.topology
        base_cost, base_memory = self._base(reserved)
        paid: frozenset[str] = frozenset()
        if fixed:
            tilings = [pinned[t.name] for t in fixed]
            priced = price(tilings, Model(Workload(fixed), topology, model.depth, beside=self.work))
            paid = _paid_by(priced)
            for name, seconds in priced.stages.items():
                if name in self.stages:
                    base_cost[:, self.stages.index(name)] += np.rint(seconds * PICO).astype(np.int64)
            base_cost[:, 0] += int(np.rint(priced.calls * PICO))
            base_memory += priced.memory
        else:
            constant = (model.speeds.step + model.call) * self.work.collections
            base_cost[:, 0] += int(np.rint(constant * PICO))
        charge, charged = self._charges(there, paid)
        base_cost[:, 0] += charged
        host_of = np.array([topology.host_of(r) for r in range(self.ranks)], np.int64)
        keep = [f for f in range(len(CHARGES)) if charge[f]]
        instance = Instance(
            names=self.work.names,
            width=self.width,
            pieces=self.pieces,
            cost=self.cost,
            home=self.home,
            memory=self.memory,
            cap=np.array(topology.caps, np.int64),
            host_of=host_of,
            uses=self.uses[:, :, keep],
            charge=charge[keep],
            shared=np.array([s in NETWORK_STAGES for s in self.stages]),
            host_cap=np.full((self.hosts, 2), NO_CAP, np.int64),
            base_cost=base_cost,
            base_memory=base_memory,
            allowed=self._ranks_allowed(),
            divisible=self.divisible,
            fixed=np.minimum(self.fixed, self.cost),
        )
        return Problem(
            model, self.work.tables, self.options, instance, self.stages, tuple(CHARGES[f] for f in keep)
        )

    # ---------------------------------------------------------------------------------------------- what is allowed

    def _allowed(self) -> Bools:
        work, options = self.work, self.options
        tables = len(work.names)
        least = np.full(tables, self.least, np.int64)
        typed = np.zeros(tables, np.bool_)
        stored = {True: np.zeros(tables, np.bool_), False: np.ones(tables, np.bool_)}
        for t, limit in self._limited():
            if limit.min_partition is not None:
                least[t] = limit.min_partition
            typed[t] = bool(limit.types)
            stored[True][t], stored[False][t] = limit.cached, limit.on_device
        there = np.zeros((tables, len(options)), np.bool_)
        for o, (way, k, width, cached) in enumerate(options):
            if way is Way.COLUMNS or way is Way.GRID:
                there[:, o] = (work.dim % k == 0) & (work.dim // k >= least)
            else:
                there[:, o] = True
            if way in (Way.ROWS, Way.GRID):
                parts = width if width > 1 else k
                enough = even_pieces(work.rows, parts) == parts
                # Who asks for rows over all ranks by name gets them, however few rows there are.
                there[:, o] &= enough | (typed & (width > 1))
            there[:, o] &= stored[cached]
            if cached:  # a dense gradient is as large as its table
                there[:, o] &= work.attached
        for t, limit in self._limited():
            if limit.types:
                there[t] &= np.array(
                    [is_of(option, limit.types, self.ranks, self.hosts) for option in options]
                )
            if limit.ranks is not None and len(set(limit.ranks)) < self.ranks:
                there[t] &= np.array([option.width < self.ranks or self.ranks == 1 for option in options])
        empty = np.flatnonzero(~there.any(1))
        if len(empty):
            limit = self.limits.get(work.names[empty[0]], Limits())
            kinds = [ShardingType(kind).value for kind in limit.types]
            raise ConfigError(
                f"Table '{work.names[empty[0]]}': nothing that its constraints allow (types {kinds or 'any'}, "
                f"{int(least[empty[0]])} columns or more, ranks {limit.ranks or 'any'}) can be made of "
                f"{work.rows[empty[0]]} x {work.dim[empty[0]]} on {self.ranks} ranks; allow more types, or narrower "
                "column tiles (min_partition)."
            )
        return there

    def _limited(self) -> list[tuple[int, Limits]]:
        if not self.limits:
            return []
        place = {name: t for t, name in enumerate(self.work.names)}
        return [(place[name], limit) for name, limit in self.limits.items() if name in place]

    def _ranks_allowed(self) -> Bools | None:
        found: Bools | None = None
        limited = self._limited()
        # The pieces of an instance are not tied to one host: tables that must be on one are given it beforehand.
        one_host = [
            t for t, limit in limited if limit.ranks is None and self.hosts > 1 and _on_one_host(limit)
        ]
        host = self._shared_out(one_host)
        for t, limit in limited:
            ranks = self.topology.ranks_of(host[t]) if t in host else limit.ranks
            if ranks is not None:
                if found is None:
                    found = np.ones((len(self.work.names), self.ranks), np.bool_)
                found[t] = False
                found[t, list(ranks)] = True
        return found

    def _shared_out(self, tables: Sequence[int]) -> dict[int, int]:
        """A host for each of some tables: the largest first, each to the host that bears least per rank."""
        work = self.work
        held = {t: int(work.rows[t]) * int(work.dim[t]) for t in tables}
        read = {t: int(work.ids[t] * work.dim[t]) for t in tables}
        # Bytes and traffic count alike; whole numbers, so every machine decides alike.
        all_held, all_read = max(sum(held.values()), 1), max(sum(read.values()), 1)
        size = {t: held[t] * all_read + read[t] * all_held for t in tables}
        least = [(0, h) for h in range(self.hosts)]
        found = {}
        for t in sorted(tables, key=lambda t: (-size[t], work.names[t])):
            borne, h = heapq.heappop(least)
            found[t] = h
            heapq.heappush(least, (borne + size[t] // len(self.topology.host_ranks[h]), h))
        return found

    # ---------------------------------------------------------------------------------------------- what it costs

    def _put(self, to: Ints, o: int, tables: Ints, stage: str, seconds: Floats) -> None:
        if stage in self.stages:
            s = self.stages.index(stage)
            to[tables, o, s] += np.rint(np.clip(seconds, 0.0, _MOST / PICO) * PICO).astype(np.int64)

    def _copies(self, o: int, t: Ints) -> None:
        """A copy on every rank: a local lookup, then all replicas' gradients everywhere."""
        model, work, rates, speeds = self.model, self.work, self.model.rates, self.model.speeds
        dim, element = work.dim[t].astype(np.float64), work.element[t]
        bags, ids, payload = self.bags[t], self.all_ids[t], self._payload(t, self.all_ids[t], self.lengths[t])
        far = model.lookup_far(t, model.own_distinct[t])
        routed = ids * speeds.route + rates.copied(2.0 * payload) + speeds.part * 2.0 * self.features[t]
        self._put(self.cost, o, t, "ids", routed)
        lookup = rates.lookup(ids, far, bags, dim, element) + rates.copied(payload)
        self._put(self.cost, o, t, "lookup and rows", lookup)
        self._put(self.cost, o, t, "gradients", bags * (rates.at("place", dim) + rates.at("pick", dim)))
        replicas = model.replicas(t)
        others = self.ranks - 1.0
        near = (self.on_host - 1.0) / others
        bytes_sent = replicas.sent * others + 2.0 * replicas.reduced * others / self.ranks
        every = model.all_distinct[t]
        state = work.cell_state[t] * work.attached[t]
        update = rates.update(
            replicas.ids,
            replicas.bags,
            every,
            model.update_far(every),
            dim,
            element,
            state,
            work.row_state[t],
        )
        dense = rates.copied(3.0 * work.rows[t] * dim * element) * ~work.attached[t]
        link = bytes_sent * near * (speeds.link_in + speeds.link_out)
        self._put(self.cost, o, t, "update", update + dense + replicas.seconds + link)
        far_seconds = bytes_sent * (1.0 - near) * (speeds.network_in + speeds.network_out)
        self._put(self.cost, o, t, NETWORK_STAGES[3], far_seconds)
        memory = model.weights(t, work.rows[t].astype(np.float64), dim)
        memory = memory + ids * KEY_BYTES + 2.0 * (replicas.sent * others + replicas.reduced)
        self.memory[t, o, model.tier] = np.ceil(memory).astype(np.int64)
        self.uses[t, o, CHARGES.index("replicas")] = True
        self.uses[t, o, CHARGES.index("partly filled")] = self.part_filled[t]

    def _payload(self, t: Ints, ids: Floats, lengths: Floats) -> Floats:
        word = np.where(self.work.rows[t] >= 1 << 31, 8.0, 4.0)
        return ids * (word + self.work.wide * self.weighted[t]) + 4.0 * lengths

    def _pieces(self, o: int, option: Option, t: Ints) -> None:
        """Any split: pieces on ranks that read for all homes."""
        model, work, rates, speeds = self.model, self.work, self.model.rates, self.model.speeds
        way, k, on, cached = option
        columns = k if way in (Way.COLUMNS, Way.GRID) else 1
        rows = k * on if way is Way.ROWS else (on if way is Way.GRID else 1)
        ranks, near, far = float(self.ranks), self.on_host - 1.0, self.ranks - self.on_host
        at_home = self.on_host / ranks
        if on > 1 and on < self.ranks:
            near, far, at_home = on - 1.0, ranks - on, on / ranks
        width = work.dim[t] / float(columns)
        element = work.element[t]
        even = np.full(len(work.names), 1.0 / rows)
        q, row_share = even, even
        cut = np.flatnonzero(work.ordered) if rows > 1 else np.zeros(0, np.int64)
        if len(cut):
            q, row_share = even.copy(), even.copy()
            cuts = row_cuts(work, cut, rows)
            q[cut] = work.share(cut[:, None], cuts[:, :-1], cuts[:, 1:]).max(1)
            row_share[cut] = (np.diff(cuts, axis=1) / work.rows[cut][:, None]).max(1)
        P, N, lengths = (x[t] for x in work.present(q))
        home_P, home_N, home_lengths = (P, N, lengths) if q is even else (x[t] for x in work.present(even))
        share = row_share[t]
        payload, home_payload = self._payload(t, N, lengths), self._payload(t, home_N, home_lengths)
        # Parts: what a home addresses. Column tiles on several ranks are parts of their own.
        parts = float(rows * columns)
        distinct = model.all_distinct[t] * share
        lookup = rates.lookup(ranks * N, model.lookup_far(t, distinct), ranks * P, width, element)
        self._put(
            self.cost, o, t, "ids",
            near * payload * speeds.link_in - payload * speeds.link_out
            + speeds.part * ranks * self.features[t],
        )  # fmt: skip
        routed = self.all_ids[t] * speeds.route + rates.copied(2.0 * parts * home_payload)
        routed = routed + speeds.part * parts * self.features[t]
        self._put(self.home, o, t, "ids", routed + parts * home_payload * speeds.link_out * at_home)
        forward, backward = model.wire(t, width, backward=False), model.wire(t, width, backward=True)
        members = 1.0
        if self.hosts > 1 and rows > 1 and on > 1:
            members = float(min(on, self.on_host)) if on == self.ranks else float(on)
        merge = np.where((members > 1.0) & (work.fan_in[t] > 1.0), 1.0, 0.0)
        union = np.zeros(len(t))
        if np.any(merge):
            union = work.present(np.minimum(even * members, 1.0))[0][t]
        direct = 1.0 - merge
        # Rows from owners to homes; inside a host as they are, to other hosts added up first.
        inner = merge * far * P * width * float(work.wide) * (members - 1.0) / max(members, 1.0)
        if cached:
            lookup = lookup + model.fetched(t, share, width)
        self._put(
            self.cost, o, t, "lookup and rows",
            lookup + rates.copied(ranks * payload)
            + P * forward * (near * speeds.link_out - speeds.link_in)
            + inner * (speeds.link_in + speeds.link_out) + merge * far * P * rates.at("place", width),
        )  # fmt: skip
        self._put(
            self.cost, o, t, "gradients",
            P * backward * (near * speeds.link_in - speeds.link_out)
            + inner * (speeds.link_in + speeds.link_out) + merge * far * P * rates.at("pick", width),
        )  # fmt: skip
        groups = parts / members
        arriving = direct * parts * home_P + merge * (
            parts * at_home * home_P + groups * (1.0 - at_home) * union
        )
        self._put(self.home, o, t, "lookup and rows", parts * home_P * forward * speeds.link_in * at_home)
        self._put(
            self.home, o, t, "gradients",
            parts * home_P * backward * speeds.link_out * at_home
            + arriving * (rates.at("place", width) + rates.at("pick", width)),
        )  # fmt: skip
        if self.hosts > 1:
            crossing = direct * P + merge * union / members
            places = np.where(union - P > 0.5, 4.0 * P, 0.0) * merge
            away = 1.0 - at_home
            network_in, network_out = speeds.network_in, speeds.network_out
            self._put(self.cost, o, t, NETWORK_STAGES[0], far * (payload + places) * network_in)
            self._put(
                self.home, o, t, NETWORK_STAGES[0], parts * (home_payload + places) * away * network_out
            )
            self._put(self.cost, o, t, NETWORK_STAGES[1], far * crossing * forward * network_out)
            self._put(self.cost, o, t, NETWORK_STAGES[2], far * crossing * backward * network_in)
            home_crossing = parts * direct * home_P + groups * merge * union
            self._put(self.home, o, t, NETWORK_STAGES[1], home_crossing * forward * away * network_in)
            self._put(self.home, o, t, NETWORK_STAGES[2], home_crossing * backward * away * network_out)
        state = work.cell_state[t] * work.attached[t]
        update = rates.update(
            ranks * work.ids[t] * q[t], ranks * P, distinct, model.update_far(distinct), width, element, state,
            work.row_state[t],
        )  # fmt: skip
        dense = rates.copied(3.0 * share * work.rows[t] * width * element) * ~work.attached[t]
        if columns > 1:
            talk = (
                4.0 * distinct * (columns - 1.0) * (work.sums[t] + 1.0) * (speeds.link_in + speeds.link_out)
            )
            talk = talk + speeds.row_sum + rates.copied(6.0 * distinct * width * float(work.wide))
            update = update + np.where(work.talks[t] > 0, talk, 0.0)
            self.uses[t, o, CHARGES.index("row sums")] = work.talks[t] > 0
        self._put(self.cost, o, t, "update", update + dense)
        weights = model.weights(t, np.ceil(share * work.rows[t]), width)
        buffers = ranks * (payload * (1 + model.depth) + P * width * work.wide + N * KEY_BYTES)
        # Rows that every home gets beyond one for each bag: as many as owners send, so counted with their pieces.
        beyond = (
            np.maximum(parts * home_P * width - self.bags[t] * work.dim[t], 0.0) * work.wide * ranks / parts
        )
        if cached:
            self.memory[t, o, HOST] += np.ceil(weights).astype(np.int64)
            weights = model.lines(t, np.ceil(share * work.rows[t]), width)
        self.memory[t, o, model.tier] += np.ceil(weights + buffers + beyond).astype(np.int64)
        self.divisible[t, o] = (way is Way.ROWS and rows > 1) & ~work.ordered[t]
        # A part is a part, however few rows it has.
        self._put(self.fixed, o, t, "ids", speeds.part * ranks * self.features[t])
        self.uses[t, o, CHARGES.index("exchange")] = True
        self.uses[t, o, CHARGES.index("hosts")] = merge > 0.0
        self.uses[t, o, CHARGES.index("partly filled")] = (rows > 1) | self.part_filled[t]

    def _charges(self, there: Bools, paid: frozenset[str]) -> tuple[Ints, int]:
        """What kinds of collectives cost once; those that no choice avoids are a base load of every rank.

        paid: kinds that pinned tables use already.
        """
        model = self.model
        talks = int(self.work.talks.max()) if len(self.work.names) else 0
        output = float(sum(self.output.tolist()))
        calls = model.call * self.work.collections
        seconds = [3 * calls, 4 * calls, 2 * calls, talks * calls, float(model.rates.copied(0.5 * output))]
        charge = np.rint(np.array(seconds) * PICO).astype(np.int64)
        for f in range(len(CHARGES)):
            if CHARGES[f] in paid or not (self.uses[:, :, f] & there).any():
                charge[f] = 0
        certain = 0
        for f in range(len(CHARGES)):
            if charge[f] and (self.uses[:, :, f] | ~there).all(1).any():
                certain += int(charge[f])
                charge[f] = 0
        return charge, certain

    def _base(self, reserved: Ints | None) -> tuple[Ints, Ints]:
        """Loads of every rank before anything is placed: what is reserved, and each home's output."""
        model, work = self.model, self.work
        cost = np.zeros((self.ranks, len(self.stages)), np.int64)
        memory = np.zeros((self.ranks, 2), np.int64) if reserved is None else np.array(reserved, np.int64)
        if memory.shape != (self.ranks, 2):
            raise ConfigError(f"Planner: reserved has shape {memory.shape}, wanted {(self.ranks, 2)}.")
        received = self._payload(np.arange(len(work.names)), self.all_ids, self.lengths)
        at_home = float(sum((3.0 * self.output + received * (1 + model.depth)).tolist()))
        memory[:, model.tier] += int(np.ceil(at_home))
        return cost, memory


def _on_one_host(limit: Limits) -> bool:
    """Column blocks are allowed, if they share a host."""
    inside = {
        ShardingType.TABLE_COLUMN_WISE, ShardingType.TABLE_WISE, ShardingType.TABLE_ROW_WISE,
        ShardingType.DATA_PARALLEL,
    }  # fmt: skip
    return ShardingType.TABLE_COLUMN_WISE in limit.types and set(limit.types) <= inside


def _paid_by(priced: Price) -> frozenset[str]:
    """The kinds of collectives that a price has in it."""
    names = {
        "rows": "exchange",
        "replica counts": "replicas",
        "dense gradients": "replicas",
        "rows in host": "hosts",
        "row sums": "row sums",
    }
    return frozenset(names[name] for name, sent in priced.sent.items() if name in names and np.any(sent > 0))
