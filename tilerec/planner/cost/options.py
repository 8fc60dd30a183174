"""The ways to cut every table as an `Instance`, and the way back from a solution to tilings.

Nouns
  option   a way to cut a table (`ways.py`): a column of the instance, the same for all tables
  group    row pieces on one host, whose rows are added there before they cross to another

Everything is computed for one option of all tables at a time, by the formulas of `Model`; the same that `price` uses
for tilings that are known. On hosts of one size, the cost of an arrangement equals `price`, but for what an instance
cannot see: which column blocks will share a host, and how traffic is spread over ranges of rows of ordered ids. There
the instance for the search takes an estimate, and a second one, for the bound, the least that can be (`Problem.lower`).

Legend: T tables, O options, S stages, W ranks, H hosts, P present bags, N ids, q share of a table's traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.cost.allowed import Allowed
from tilerec.planner.cost.cuts import row_cuts
from tilerec.planner.cost.home_side import WAYS, home_network
from tilerec.planner.cost.host_factors import HostFactors
from tilerec.planner.cost.host_sums import sums_inside_hosts
from tilerec.planner.cost.model import HOST, KEY_BYTES, NETWORK_STAGES, STAGE_OF_NETWORK, Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.price import Price, price
from tilerec.planner.cost.realise import sharding_of
from tilerec.planner.cost.ways import MIN_PARTITION, Limits, Option, Way
from tilerec.planner.cost.workload import TableWork, Workload
from tilerec.planner.search.instance import NO_CAP, Bools, Instance, Ints
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

PICO = 1e12
CHARGES = (
    "exchange", "replicas", "replica rows", "replica row numbers", "dense replicas", "hosts", "row sums",
    "partly filled",
)  # fmt: skip
"""What is paid once if any table needs it: collectives as such, and an output that begins as zeros."""
_MOST = 1 << 52
_STEPS = 64  # a change of a range by 1 / _STEPS shows how present bags go with its rows


@dataclass(frozen=True, eq=False)
class Problem:
    """An instance, and what its numbers stand for.

    Args:
        tables: those that are not pinned, in the instance's order.
        lower: costs and memory that no plan is below, in the same order; often the instance itself.
    """

    model: Model
    tables: tuple[TableWork, ...]
    options: tuple[Option, ...]
    instance: Instance
    lower: Instance
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
    together: Sequence[Sequence[str]] = (),
) -> Problem:
    """Everything a search has to know.

    Args:
        tables: of the model; different names.
        limits: by table name.
        pinned: tables whose tilings are given: their cost and memory are base loads.
        reserved: [W, 2] bytes that are taken already, in each memory tier.
        pipeline_depth: batches whose ids are under way at once, beside the one that is computed.
        min_partition: of tables without limits of their own.
        together: names of tables that lie on the same ranks, in groups.

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
    # What both parts have in common is that of all tables.
    everything = Workload(tables)
    work = everything.part(free) if fixed else everything
    rest = everything.part(fixed)
    model = Model(work, topology, pipeline_depth, beside=rest if fixed else None)
    paid: Price | None = None
    if fixed:
        paid = price([pinned[t.name] for t in fixed], Model(rest, topology, pipeline_depth, beside=work))
    builder = _Builder(model, limits, min_partition, lower=False, pinned=bool(fixed), together=together)
    instance = lower = builder.instance(paid, reserved)
    if not builder.exact:
        lower = _Builder(
            model, limits, min_partition, lower=True, pinned=bool(fixed), together=together
        ).instance(paid, reserved)
    return Problem(model, work.tables, builder.options, instance, lower, model.stages, builder.charges)


class _Builder:
    """One instance. lower: what is not known counts as the least that it can be."""

    def __init__(
        self, model: Model, limits: Mapping[str, Limits], min_partition: int, *, lower: bool, pinned: bool,
        together: Sequence[Sequence[str]] = (),
    ) -> None:  # fmt: skip
        self.model, self.work, self.topology = model, model.workload, model.topology
        self.lower, self.ranks, self.hosts = lower, model.ranks, self.topology.host_count
        allowed = Allowed(model, limits, min_partition, lower=lower, together=together)
        self.options, self.there, self.allowed = allowed.options, allowed.there, allowed.on
        self.one_host = allowed.one_host
        self.bags, self.all_ids, self.lengths = self.work.present(np.ones(len(self.work.names)))
        self.host_factors = HostFactors(model, lower=lower, pinned=pinned)
        self.sizes, self.sides = self.host_factors.sizes, self.host_factors.sides
        self.alike = self.host_factors.alike
        self.stages = model.stages
        # Where rows are added up inside hosts, homes' sides are stages of their own (home_side.py).
        self.twins: dict[str, int] = {}
        many = np.array(
            [option.width > 1 and option.way is not Way.COPIES for option in self.options], np.bool_
        )
        summed = self.there & many & (self.work.fan_in > 1.0)[:, None]
        if (
            self.hosts > 1
            and self.topology.nic == "device"
            and model.speeds.duplex
            and self.alike
            and summed.any()
        ):
            self.twins = {name: len(self.stages) + i for i, name in enumerate(("rows", "gradients"))}
            self.stages += tuple(f"{name} at home" for name in self.twins)
        self.charges: tuple[str, ...] = ()
        shape = (len(self.work.names), len(self.options), len(self.stages))
        self.cost = np.zeros(shape, np.int64)
        self.home = np.zeros(shape, np.int64)
        self.memory = np.zeros((*shape[:2], 2), np.int64)
        self.home_memory = np.zeros((*shape[:2], 2), np.int64)
        self.least_memory = np.zeros((*shape[:2], 2), np.int64)
        self.uses = np.zeros((*shape[:2], len(CHARGES)), np.bool_)
        self.width = np.zeros(shape[:2], np.int64)
        self.pieces = np.ones(shape[:2], np.int64)
        self.divisible = np.zeros(shape[:2], np.bool_)
        self.fixed = np.zeros(shape, np.int64)
        work = self.work
        self.output = work.per_table(work.bags) * work.dim * float(work.wide)
        self.part_filled = np.zeros(len(work.names), np.bool_)
        self.part_filled[work.table[work.ids_per_bag < 1.0]] = True
        # Of a table's ids, the part that has weights.
        self.weighted = work.per_table(work.bags * work.ids_per_bag * work.weighted) / np.maximum(
            work.ids, 1e-300
        )
        self.features = work.per_table(np.ones(len(work.bags)))
        # Memory is that of the longest range where another instance is the bound's.
        self.rounded_up = not self.exact and not lower
        # How a table's traffic is spread over its pieces, in a lower bound.
        self.unknown = work.ordered & lower
        every = np.arange(len(work.names))
        self.whole_payload = self._payload(every, 1.0, self.all_ids, self.lengths)

    @property
    def exact(self) -> bool:
        """Whether nothing that costs depends on what an instance cannot see."""
        rows = np.array([option.way is Way.ROWS for option in self.options], np.bool_)
        if self.one_host:
            return False
        if self.hosts > 1:
            columns = np.array([option.way is Way.COLUMNS for option in self.options], np.bool_)
            summed = self.there[self.work.talks > 0][:, columns].any()
            if not self.alike or summed or not self.model.speeds.duplex:
                return False
        return not self.there[self.work.ordered][:, rows].any()

    def instance(self, given: Price | None, reserved: Ints | None) -> Instance:
        """given: the price of tables whose tilings are given."""
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
        topology = self.topology
        single = [o for o, option in enumerate(self.options) if option.width == 1]
        base_cost, base_memory = self._base(reserved)
        paid: frozenset[str] = frozenset()
        if given is not None:
            paid = _paid_by(given)
            for name, seconds in given.stages.items():
                base_cost[:, self.stages.index(name)] += np.floor(seconds * PICO).astype(np.int64)
            base_cost[:, 0] += int(given.calls * PICO)
            base_memory += given.memory
        else:
            base_cost += self._constant()
        charge, charged = self._charges(there, paid)
        base_cost[:, 0] += charged
        host_of = np.array([topology.host_of(r) for r in range(self.ranks)], np.int64)
        keep = [f for f in range(len(CHARGES)) if charge[f]]
        self.charges = tuple(CHARGES[f] for f in keep)
        phase = np.arange(len(self.stages))
        for name, twin in self.twins.items():
            phase[twin] = self._stage(name)
            # Sums inside a host cost all its ranks alike, however rows are split.
            self.fixed[:, :, twin] = self.cost[:, :, twin]
        between = np.array([s in NETWORK_STAGES for s in self.stages])
        return Instance(
            names=self.work.names,
            width=self.width,
            pieces=self.pieces,
            cost=self.cost,
            home=self.home,
            memory=self.memory,
            home_memory=self.home_memory,
            least_memory=self.least_memory,
            cap=np.array(topology.caps, np.int64),
            host_of=host_of,
            uses=self.uses[:, :, keep],
            charge=charge[keep],
            shared=between & (topology.nic == "host"),
            slow=self.host_factors.factors("cost", self.cost[:, single].sum((0, 1))),
            reach=self.host_factors.factors("home", self.home[:, single].sum((0, 1))),
            host_cap=np.full((self.hosts, 2), NO_CAP, np.int64),
            base_cost=base_cost,
            base_memory=base_memory,
            allowed=self.allowed,
            divisible=self.divisible,
            fixed=np.minimum(self.fixed, self.cost),
            phase=phase,
        )

    # ---------------------------------------------------------------------------------------------- what it costs

    def _put(self, to: Ints, o: int, tables: Ints, stage: str, seconds: Any, *, at_home: bool = True) -> int:
        """Whole picoseconds, rounded down: what is put together is never above the price. Returns their sum.

        at_home: they are in the home's side of an exchange, too.
        """
        if self.hosts == 1 and stage in NETWORK_STAGES:
            return 0
        whole = np.floor(np.clip(seconds, 0.0, _MOST / PICO) * PICO).astype(np.int64)
        to[tables, o, self._stage(stage)] += whole
        if at_home and stage in self.twins and to is not self.fixed:
            to[tables, o, self.twins[stage]] += np.where(self.unknown[tables], 0, whole)
        return int(whole.sum())

    def _stage(self, name: str) -> int:
        """The number of a stage; that of a network card's, where ranks have their own, is its namesake's."""
        return self.stages.index(name if name in self.stages else STAGE_OF_NETWORK[name])

    def _copies(self, o: int, t: Ints) -> None:
        """A copy on every rank: a local lookup, then all replicas' gradients everywhere."""
        model, work, rates, speeds = self.model, self.work, self.model.rates, self.model.speeds
        dim, element = work.dim[t].astype(np.float64), work.element[t]
        bags, ids, payload = self.bags[t], self.all_ids[t], self.whole_payload[t]
        far = model.lookup_far(t, model.own_distinct[t])
        routed = ids * speeds.route + rates.copied(2.0 * payload) + speeds.part * 2.0 * self.features[t]
        self._put(self.cost, o, t, "ids", routed)
        lookup = rates.lookup(ids, far, bags, dim, element) + rates.copied(payload)
        self._put(self.cost, o, t, "lookup", lookup)
        self._put(self.cost, o, t, "gradients", bags * (rates.at("place", dim) + rates.at("pick", dim)))
        replicas = model.replicas(t)
        others = self.ranks - 1.0
        bytes_sent = replicas.sent * others + 2.0 * replicas.reduced * others / self.ranks
        every = model.all_distinct[t]
        state = work.cell_state[t] * work.attached[t]
        update = rates.update(
            replicas.ids, replicas.bags, every, model.update_far(every), dim, element, state, work.row_state[t]
        )  # fmt: skip
        dense = rates.copied(3.0 * work.rows[t] * dim * element) * ~work.attached[t]
        near, far_bytes = (bytes_sent * peers / others for peers in self._peers())
        link = rates.exchanged(near, near)
        self._put(self.cost, o, t, "update", update + dense + replicas.seconds + link)
        self._put(self.cost, o, t, NETWORK_STAGES[3], rates.exchanged(far_bytes, far_bytes, network=True))
        memory = model.weights(t, work.rows[t].astype(np.float64), dim)
        memory = memory + payload * (1 + model.depth) + bags * dim * work.wide + ids * KEY_BYTES
        memory = memory + 2.0 * (replicas.sent * others + replicas.reduced)
        self.memory[t, o, model.tier] = np.floor(memory).astype(np.int64)
        for name, forms in (
            ("replicas", (0, 1, 2)), ("replica rows", (0, 1)), ("replica row numbers", (1,)),
            ("dense replicas", (2, 3)),
        ):  # fmt: skip
            self.uses[t, o, CHARGES.index(name)] = np.isin(replicas.form, forms)
        self.uses[t, o, CHARGES.index("partly filled")] = self.part_filled[t]

    def _peers(self) -> tuple[float, float]:
        """Other ranks of a rank's host, and of other hosts: where copies take longest to reach them all, or least."""
        some = min if self.lower else max
        if self.topology.nic == "host":  # each is a stage of its own
            return some(self.sizes) - 1.0, some(self.ranks - n for n in self.sizes) * 1.0
        rates = self.model.rates

        def seconds(n: int) -> float:
            away = float(self.ranks - n)
            return float(rates.exchanged(n - 1.0, n - 1.0) + rates.exchanged(away, away, network=True))

        n = some(self.sizes, key=seconds)
        return n - 1.0, float(self.ranks - n)

    def _payload(self, t: Ints, share: Any, ids: Floats, lengths: Floats) -> Floats:
        word = np.where(self.work.rows[t] * share >= 1 << 31, 8.0, 4.0)
        return ids * (word + self.work.wide * self.weighted[t]) + 4.0 * lengths

    def _pieces(self, o: int, option: Option, t: Ints) -> None:
        """Any split: pieces on ranks that read for all homes.

        Of an exchange, owners and homes bear their sides (`home_side.py`): owners get ids, send rows, get gradients.
        """
        model, work, rates, speeds = self.model, self.work, self.model.rates, self.model.speeds
        way, k, on, cached = option
        columns = k if way in (Way.COLUMNS, Way.GRID) else 1
        rows = k * on if way is Way.ROWS else (on if way is Way.GRID else 1)
        ranks = float(self.ranks)
        width = work.dim[t] / float(columns)
        element = work.element[t]
        even = np.full(len(work.names), 1.0 / rows)
        q, row_share = even, even
        cut = np.flatnonzero(work.ordered) if rows > 1 else np.zeros(0, np.int64)
        if len(cut):
            # The piece with most of the ids, and the one with most of the rows; or with the least.
            q, row_share = even.copy(), even.copy()
            cuts = row_cuts(work, cut, rows)
            some = np.min if self.lower else np.max
            q[cut] = some(work.share(cut[:, None], cuts[:, :-1], cuts[:, 1:]), axis=1)
            row_share[cut] = some(np.diff(cuts, axis=1) / work.rows[cut][:, None], axis=1)
        P, N, lengths = (x[t] for x in work.present(q))
        home_P, home_N, home_lengths = (P, N, lengths) if q is even else (x[t] for x in work.present(even))
        if self.lower and q is not even:
            # All ranges together have at least the bags of the whole table.
            whole = (self.bags[t] / rows, self.all_ids[t] / rows, self.lengths[t] / rows)
            home_P, home_N, home_lengths = (
                np.where(work.ordered[t], least, known)
                for least, known in zip(whole, (home_P, home_N, home_lengths), strict=True)
            )
        share = row_share[t]
        # Of what goes with present bags, what a smaller range of rows would not save: bags of many ids are in any.
        fewer = work.present(q * (1.0 - 1.0 / _STEPS))[0][t]
        kept = np.clip(1.0 - _STEPS * (1.0 - fewer / np.maximum(P, 1e-300)), 0.0, 1.0)
        payload = self._payload(t, share, N, lengths)
        home_payload = self._payload(t, share, home_N, home_lengths)
        # Parts: what a home addresses. Column tiles on several ranks are parts of their own, and so are their ids.
        parts = float(rows * columns)
        distinct = model.all_distinct[t] * share
        forward, backward = model.wire(t, width, backward=False), model.wire(t, width, backward=True)
        sums = sums_inside_hosts(model, on, parts, even, t, lower=self.lower)
        merge, direct = sums.merge, 1.0 - sums.merge
        sent, home_sums = sums.sent, sums.home
        if self.lower and q is not even:
            # A sum has at least its least member's bags, and all sums of a home those of the whole table.
            sent = np.where(work.ordered[t], P / sums.most * sums.turn, sent)
            home_sums = np.where(work.ordered[t], self.bags[t], home_sums)
        head = 8.0 * self.features[t]
        # What an owner gets from and sends to each home of its host, and of others.
        self._link(o, t, "ids", head, on)
        self._link(o, t, "ids", payload, on)
        self._link(o, t, "rows", P * forward, on, kept)
        self._link(o, t, "gradients", P * backward, on, kept)
        for stage, count in (
            ("ids", head + home_payload),
            ("rows", home_P * forward),
            ("gradients", home_P * backward),
        ):
            self._home_link(o, t, stage, parts * count)
        if self.hosts > 1:  # else no byte leaves a host
            crossing = direct * P + merge * sent
            places = 4.0 * merge * work.positions(even, np.minimum(even * sums.apart, 1.0))[t]
            if self.lower:
                places = np.where(work.ordered[t], 0.0, places)
            heads = head + merge * 4.0 * self.features[t] * (1.0 + sums.most) / sums.most * (sums.far > 0.0)
            home_crossing = parts * direct * home_P + merge * home_sums
            apart = np.where(
                merge > 0.0, 1.0, kept
            )  # a sum's way out is shared by its members, whatever rows they hold
            at_home = parts * (heads + home_payload + places)
            for stage, count, home_count, fixed in (
                ("ids", heads + payload + places, at_home, 0.0),
                ("rows", crossing * forward, home_crossing * forward, apart),
                ("gradients", crossing * backward, home_crossing * backward, apart),
            ):
                self._link(o, t, stage, count, on, fixed, network=True)
                self._home_link(o, t, stage, home_count, network=True)
        # Rows from owners to homes; inside a host as they are, to other hosts added up first.
        n = sums.proxies
        inner = merge * sums.far * P * width * float(work.wide) * (n - 1.0) / n
        lookup = rates.lookup(ranks * N, model.lookup_far(t, distinct), ranks * P, width, element)
        if cached:
            lookup = lookup + model.fetched(t, share, width)
        self._put(self.cost, o, t, "ids", speeds.part * ranks * self.features[t])
        self._put(self.cost, o, t, "lookup", lookup + rates.copied(ranks * payload))
        self._put(self.fixed, o, t, "lookup", kept * ranks * P * rates.at("lookup_bag", width))
        for stage, rate in (("rows", "place"), ("gradients", "pick")):
            seconds = rates.exchanged(inner, inner) + merge * sums.far * P * rates.at(rate, width)
            self._put(self.cost, o, t, stage, seconds)
            # A proxy takes in what all members send, however few rows it holds itself.
            self._put(self.fixed, o, t, stage, seconds)
        routed = columns * self.all_ids[t] * speeds.route + rates.copied(2.0 * parts * home_payload)
        self._put(self.home, o, t, "ids", routed + speeds.part * parts * self.features[t])
        placed = rates.at("place", width) + rates.at("pick", width)
        self._put(self.home, o, t, "gradients", (direct * parts * home_P + merge * home_sums) * placed)
        if on > 1:  # on the pieces' own hosts, rows of members come as they are
            self._put(
                self.cost, o, t, "gradients", merge * np.maximum(sums.apart * P - sums.union, 0.0) * placed
            )
        state = work.cell_state[t] * work.attached[t]
        update = rates.update(
            ranks * work.ids[t] * q[t], ranks * P, distinct, model.update_far(distinct), width, element, state,
            work.row_state[t],
        )  # fmt: skip
        dense = rates.copied(3.0 * share * work.rows[t] * width * element) * ~work.attached[t]
        self._put(self.cost, o, t, "update", update + dense)
        self._put(self.fixed, o, t, "update", kept * ranks * P * rates.at("update_bag", width))
        if columns > 1:
            self._row_sums(o, t, way, columns, distinct, width)
        # The last range is the shortest, the first the longest.
        fair = np.maximum(share * work.rows[t], 1e-300)
        last = np.maximum(work.rows[t] - (rows - 1.0) * np.ceil(fair), 0.0)
        held = fair if q is not even else np.ceil(fair) if self.rounded_up else last
        weights = model.weights(t, held, width)
        # Present bags are a concave function of a range's rows: a longer one has no more of them than in proportion.
        part = held / fair
        buffers = part * ranks * (payload * (1 + model.depth) + P * width * work.wide + N * KEY_BYTES)
        # What a home gets and sends beyond a whole table's.
        beyond = np.maximum(parts * home_P * width - self.bags[t] * work.dim[t], 0.0) * work.wide
        beyond = beyond + np.maximum(parts * home_payload - self.whole_payload[t], 0.0) * (1 + model.depth)
        if cached:
            self.memory[t, o, HOST] += np.floor(weights).astype(np.int64)
            weights = model.lines(t, held, width)
        self.memory[t, o, model.tier] += np.floor(weights + buffers).astype(np.int64)
        self.home_memory[t, o, model.tier] += np.floor(beyond * part).astype(np.int64)
        self.divisible[t, o] = (way is Way.ROWS and rows > 1) & ~work.ordered[t]
        # Unlike ranges have fewer present bags in all, though no fewer than the whole table.
        buffers = self.whole_payload[t] * (1 + model.depth) + self.bags[t] * width * work.wide
        buffers = ranks * (buffers + self.all_ids[t] * KEY_BYTES)
        every = work.rows[t].astype(np.float64)
        weights = model.weights(t, every, width)
        if cached:
            self.least_memory[t, o, HOST] += np.floor(weights / rows).astype(np.int64)
            weights = model.lines(t, every, width)
        self.least_memory[t, o, model.tier] += np.floor((weights + buffers) / rows).astype(np.int64)
        # A part is a part, however few rows it has.
        self._put(self.fixed, o, t, "ids", speeds.part * ranks * self.features[t])
        self.uses[t, o, CHARGES.index("exchange")] = self.ranks > 1
        self.uses[t, o, CHARGES.index("hosts")] = merge > 0.0
        self.uses[t, o, CHARGES.index("partly filled")] = (rows > 1) | self.part_filled[t]

    def _link(
        self, o: int, t: Ints, name: str, count: Floats, on: int, fixed: Floats | float = 0.0, *, network: bool = False
    ) -> None:  # fmt: skip
        """Bytes between an owner and each of its homes; fixed: the part that does not go with rows."""
        sides, host = self.sides[name][network], self.host_factors.host(name, network=network, on=on)
        # How much of it a home saves is not known where traffic is not spread as rows are.
        each = np.where(self.unknown[t], sides.whole[host], sides.own[host])
        stage = self._put_link("cost", self.cost, o, t, name, count * each, network)
        self._put(self.fixed, o, t, stage, fixed * count * each)

    def _home_link(self, o: int, t: Ints, name: str, count: Floats, *, network: bool = False) -> None:
        """Bytes between a home and all owners."""
        if network and name in self.twins:
            seconds = np.where(self.unknown[t], 0.0, count) * home_network(self.model)
            self.home[t, o, self.twins[name]] += np.floor(seconds * PICO).astype(np.int64)
        each = self.sides[name][network].home[self.host_factors.home_host(name, network=network)]
        if each > 0.0:
            seconds = np.where(self.unknown[t], 0.0, count) * each
            self._put_link("home", self.home, o, t, name, seconds, network)

    def _put_link(
        self, kind: str, to: Ints, o: int, t: Ints, name: str, seconds: Floats, network: bool
    ) -> str:  # fmt: skip
        """Returns the stage."""
        stage = NETWORK_STAGES[list(WAYS).index(name)] if network else name
        # Links inside hosts: not of single pieces, of which a host may have few.
        put = self._put(to, o, t, stage, seconds, at_home=not network and self.options[o].width > 1)
        if self.options[o].width == 1:
            self.host_factors.links[kind][self._stage(stage)] += put
        return stage

    def _row_sums(self, o: int, t: Ints, way: Way, columns: int, distinct: Floats, width: Floats) -> None:
        """Column blocks of rules over whole rows send each other sums."""
        work, rates, speeds = self.work, self.model.rates, self.model.speeds
        others = columns - 1.0
        if way is Way.GRID:
            near, far = 0.0, others
        elif self.hosts == 1:
            near, far = others, 0.0
        elif self.lower:  # as many as can share a host
            far = max(0.0, columns - self.sizes[-1])
            near = others - far if self.topology.nic == "device" else 0.0
        else:  # blocks lie anywhere
            far = others * (self.ranks - self.ranks / self.hosts) / (self.ranks - 1.0)
            near = others - far
        sums = 4.0 * distinct * (work.sums[t] + 1.0)
        seconds = speeds.row_sum + rates.copied(6.0 * distinct * width * float(work.wide))
        seconds = seconds + rates.exchanged(sums * near, sums * near)
        talks = work.talks[t] > 0
        self._put(self.cost, o, t, "update", np.where(talks, seconds, 0.0))
        crossing = rates.exchanged(sums * far, sums * far, network=True)
        self._put(self.cost, o, t, NETWORK_STAGES[3], np.where(talks, crossing, 0.0))
        self.uses[t, o, CHARGES.index("row sums")] = talks

    def _charges(self, there: Bools, paid: frozenset[str]) -> tuple[Ints, int]:
        """What kinds of collectives cost once; those that no choice avoids are a base load of every rank.

        paid: kinds that pinned tables use already.
        """
        model = self.model
        talks = int(self.work.talks.max()) if len(self.work.names) else 0
        output = float(sum(self.output.tolist()))
        calls = model.call * self.work.collections
        seconds = [
            3 * calls, calls, 2 * calls, calls, calls, 2 * calls, talks * calls,
            float(model.rates.copied(0.5 * output)),
        ]  # fmt: skip
        charge = np.floor(np.array(seconds) * PICO).astype(np.int64)
        for f in range(len(CHARGES)):
            if CHARGES[f] in paid or not (self.uses[:, :, f] & there).any():
                charge[f] = 0
        certain = 0
        for f in range(len(CHARGES)):
            if charge[f] and (self.uses[:, :, f] | ~there).all(1).any():
                certain += int(charge[f])
                charge[f] = 0
        return charge, certain

    def _constant(self) -> Ints:
        """[R, S] ps of a step that no table adds to."""
        model, topology = self.model, self.topology
        constant = np.zeros((self.ranks, len(self.stages)), np.int64)
        on_host = np.array(
            [len(topology.ranks_of(topology.host_of(r))) for r in range(self.ranks)], np.float64
        )
        near, far = 4.0 * (on_host - 1.0), 4.0 * (self.ranks - on_host)
        header = model.rates.exchanged(near, near)
        once = (model.speeds.step + model.call) * self.work.collections
        constant[:, 0] = np.floor((once + header) * PICO).astype(np.int64)
        if self.hosts > 1:  # else no byte leaves a host
            # Of a card that ranks share, their mean: the same on each of them.
            away = model.rates.exchanged(far, far, network=True)
            constant[:, self._stage(NETWORK_STAGES[0])] += np.floor(away * PICO).astype(np.int64)
        return constant

    def _base(self, reserved: Ints | None) -> tuple[Ints, Ints]:
        """Loads of every rank before anything is placed: what is reserved, and each home's output."""
        model, work = self.model, self.work
        cost = np.zeros((self.ranks, len(self.stages)), np.int64)
        memory = np.zeros((self.ranks, 2), np.int64) if reserved is None else np.array(reserved, np.int64)
        if memory.shape != (self.ranks, 2):
            raise ConfigError(f"Planner: reserved has shape {memory.shape}, wanted {(self.ranks, 2)}.")
        rows = self.bags * work.dim * float(work.wide)
        at_home = 2.0 * self.output + rows + self.whole_payload * (1 + model.depth)
        memory[:, model.tier] += int(float(sum(at_home.tolist())))
        return cost, memory


def _paid_by(priced: Price) -> frozenset[str]:
    """The kinds of collectives that a price has in it."""
    names = {
        "rows": ("exchange",),
        "replica gradients": ("replicas", "replica rows"),
        "replica rows": ("replicas", "replica row numbers"),
        "replica gradients, dense": ("replicas", "dense replicas"),
        "dense gradients": ("dense replicas",),
        "rows in host": ("hosts",),
        "row sums": ("row sums",),
    }
    kinds = (names[name] for name, sent in priced.sent.items() if name in names and np.any(sent > 0))
    return frozenset(kind for some in kinds for kind in some)
