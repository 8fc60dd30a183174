"""`OptionAmounts`: costs and bytes of every option of every table as whole numbers, filled in one option at a time.

Legend: T tables, O options, S stages, M memory tiers (0 device, 1 host), F fixed charges (CHARGES).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilerec.planner.cost.allowed import Allowed
from tilerec.planner.cost.cuts import RangesByFrequency
from tilerec.planner.cost.home_side import HostFactors, home_network
from tilerec.planner.cost.model import NETWORK_OF_STAGE, NETWORK_STAGES, STAGE_OF_NETWORK, Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.ways import Option, Way
from tilerec.planner.cost.workload import Bools, Ints
from tilerec.planner.search.instance import PICO

CHARGES = (
    "exchange", "replicas", "replica rows", "dense replicas", "replica shares", "hosts",
    "row sums", "partly filled",
)  # fmt: skip
"""Fixed charges: costs that a plan pays once if any table needs them.

Each is the latency of one or more collectives; "partly filled" sets an output to zeros beforehand.
"""
LARGEST_PS = 1 << 52  # of one number: sums of a thousand of them fit into int64


class OptionAmounts:
    """Arrays over tables and options, in the form of an `Instance`.

    cost: [T, O, S] ps of a piece on each rank that holds it. home: [T, O, S] ps on every rank. fixed: [T, O, S] ps of
    `cost` that do not depend on the rows of a piece. memory, home_memory, least_memory: [T, O, M] bytes. uses: [T, O,
    F] charges that an option pays. divisible: [T, O]. stages: names of the stages. twins: stage -> index of the stage
    for its exchange at home, if hosts sum rows (home_side.py).

    Args:
        allowed: options, and the tables that may use them.
        ranges: of the tables with ordered ids, shared by estimates and bounds; None: new ones.
        lower: amounts that depend on places are lower bounds; else they are estimates.
        pinned: other tables have given tilings. even_room: all ranks have equal memory left for tables.
    """

    def __init__(
        self, model: Model, allowed: Allowed, ranges: RangesByFrequency | None = None, *, lower: bool, pinned: bool,
        even_room: bool,
    ) -> None:  # fmt: skip
        self.model, self.work, self.topology, self.lower = model, model.workload, model.topology, lower
        self.even_room = even_room
        self.ranks, self.hosts = model.ranks, self.topology.host_count
        self.allowed, self.options, self.there = allowed, allowed.options, allowed.there
        work = self.work
        self.host_factors = HostFactors(model, lower=lower, pinned=pinned)
        self.sizes, self.sides = self.host_factors.sizes, self.host_factors.sides
        self.stages = model.stages
        self.twins: dict[str, int] = {}
        if self._exchanges_at_home():
            self.twins = {name: len(self.stages) + i for i, name in enumerate(("rows", "gradients"))}
            self.stages += tuple(f"{name} at home" for name in self.twins)
        shape = (len(work.names), len(self.options), len(self.stages))
        self.cost, self.home, self.fixed = (_by_option(shape) for _ in range(3))
        self.memory, self.home_memory, self.least_memory = (_by_option((*shape[:2], 2)) for _ in range(3))
        self.uses = np.zeros((*shape[:2], len(CHARGES)), np.bool_)
        self.divisible = np.zeros(shape[:2], np.bool_)
        # Of whole tables, [T]: present bags, ids and lengths of one home; features; ids with weights.
        self.bags, self.ids, self.lengths = work.present(np.ones(len(work.names)))
        self.features = work.per_table(np.ones(len(work.bags)))
        self.weighted = work.per_table(work.bags * work.ids_per_bag * work.weighted)
        self.payload = self.payload_of(np.arange(len(work.names)), 1.0, 1.0, self.ids, self.lengths)
        # The same if ids travel once each wherever they may.
        self.least_bags, least_ids, lengths = work.present(1.0, self.distinct_if(self.sent_once(1.0)))
        self.least_payload = self.payload_of(np.arange(len(work.names)), 1.0, 1.0, least_ids, lengths)
        self.output = work.per_table(work.bags) * work.dim * float(work.wide)  # bytes of a home's output
        self.part_filled = np.zeros(len(work.names), np.bool_)  # some bags of the table are empty
        self.part_filled[work.table[work.ids_per_bag < 1.0]] = True
        # If a second instance serves as the bound, memory is that of the longest range of rows.
        self.rounded_up = not self.exact and not lower
        self.ranges = RangesByFrequency(model, np.flatnonzero(work.ordered)) if ranges is None else ranges

    def _exchanges_at_home(self) -> bool:
        """Return True if a home's side of an exchange is a stage of its own: hosts sum rows before they send them."""
        many = [option.width > 1 and option.way is not Way.COPIES for option in self.options]
        summed = self.there & np.array(many, np.bool_) & (self.work.fan_in > 1.0)[:, None]
        cards_per_rank = self.topology.nic == "device" and self.model.speeds.duplex
        return self.hosts > 1 and cards_per_rank and self.host_factors.alike and bool(summed.any())

    @property
    def exact(self) -> bool:
        """True if no amount depends on facts that an instance does not contain; then the estimates are prices."""
        rows = np.array([option.way is Way.ROWS for option in self.options], np.bool_)
        if self.allowed.one_host:
            return False
        if self.hosts > 1:
            columns = np.array([option.way is Way.COLUMNS for option in self.options], np.bool_)
            summed = self.there[self.work.talks > 0][:, columns].any()
            if not self.host_factors.alike or summed or not self.model.speeds.duplex:
                return False
        return not self.there[self.work.ordered][:, rows].any() and not self._homes_differ().any()

    def as_in_bound(self, option: Option) -> bool:
        """Return True if a bound has the same times of an option, but for row sums: places tell no more."""
        known = self.host_factors.alike and self.model.speeds.duplex and not self.model.may_send_once.any()
        return known and not (option.ranges > 1 and self.work.ordered.any())

    def take(self, other: OptionAmounts, o: int) -> None:
        """Take the times and charges of option o from other amounts."""
        for name in ("cost", "home", "fixed", "uses", "divisible"):
            getattr(self, name)[:, o] = getattr(other, name)[:, o]

    def take_memory(self, other: OptionAmounts, o: int) -> None:
        """Take the bytes of option o from other amounts."""
        for name in ("memory", "home_memory", "least_memory"):
            getattr(self, name)[:, o] = getattr(other, name)[:, o]

    def _homes_differ(self) -> Bools:
        """Return [O] options of which some homes send repeated ids once, and others do not, owners aside."""
        found = np.zeros(len(self.options), np.bool_)
        far = self.sent_once(1.0)
        for o, option in enumerate(self.options):
            if 1 < option.holders < self.ranks:
                own = self.sent_once(1.0 - 1.0 / option.holders)
                found[o] = np.any((own != far) & self.there[self.work.table, o])
        return found

    def sent_once(self, remote: Floats | float) -> Bools:
        """Return [F] features whose ids a home sends once each, if others look up a part `remote` of their tables."""
        return self.model.sent_once(np.arange(len(self.work.bags)), remote if self.ranks > 1 else 0.0)

    def distinct_if(self, once: Bools) -> Floats:
        """Return [F] distinct ids in a home's batch of features whose ids travel once each; -1 for other features."""
        if not once.any():
            return np.full(len(once), -1.0)
        return np.where(once, self.model.seen_by_feature.whole, -1.0)

    def payload_of(self, t: Ints, rows: Any, reads: Any, ids: Floats, lengths: Floats) -> Floats:
        """Return the bytes of ids, weights and lengths that a home sends to a piece of tables t.

        Args:
            rows, reads: share of the tables' rows, and of their traffic.
        """
        word = np.where(self.work.rows[t] * rows >= 1 << 31, 8.0, 4.0)
        return ids * word + self.work.wide * self.weighted[t] * reads + 4.0 * lengths

    def stage(self, name: str) -> int:
        """Return the index of a stage; for network cards of ranks, that of the stage that contains their time."""
        return self.stages.index(name if name in self.stages else STAGE_OF_NETWORK[name])

    def use(self, charge: str, o: int, t: Ints, used: Any) -> None:
        """Record whether tables t pay a charge under option o."""
        self.uses[t, o, CHARGES.index(charge)] = used

    def unknown(self, o: int, t: Ints) -> Bools | np.bool_:
        """Return [n] tables whose traffic is spread over the pieces of option o in a way that a bound does not know.

        A single False if there are none.
        """
        return self.work.ordered[t] if self.lower and self.options[o].ranges > 1 else np.False_

    def put(self, to: Ints, o: int, t: Ints, stage: str, seconds: Any, *, at_home: bool = True) -> int:
        """Add seconds to one of the arrays, in whole picoseconds, and return their sum.

        They are rounded down, so that the sum of parts is never above the price.

        Args:
            at_home: they also belong to the home's side of an exchange.
        """
        if self.hosts == 1 and stage in NETWORK_STAGES:
            return 0
        whole = (np.minimum(np.maximum(seconds, 0.0), LARGEST_PS / PICO) * PICO).astype(np.int64)
        place = to[:, o, self.stage(stage)]
        if len(t) == len(place):  # all tables: without a copy
            place += whole
        else:
            place[t] += whole
        if at_home and stage in self.twins and to is not self.fixed:
            to[:, o, self.twins[stage]][t] += np.where(self.unknown(o, t), 0, whole)
        return int(whole.sum())

    def put_owner_bytes(
        self, o: int, t: Ints, name: str, count: Floats, on: int, fixed: Floats | float = 0.0, *, network: bool = False
    ) -> None:  # fmt: skip
        """Add the exchange between an owner and its homes.

        Args:
            name: of the exchange. count: bytes to or from each home. on: ranks that hold a piece.
            fixed: part of the bytes that does not depend on the rows of the piece.
        """
        sides, host = self.sides[name][network], self.host_factors.host(name, network=network, on=on)
        # If traffic is not spread like rows, it is unknown how much of it the owner saves as a home.
        each = np.where(self.unknown(o, t), sides.whole[host], sides.own[host])
        stage = self._put_link("cost", o, t, name, count * each, network)
        if np.any(fixed):
            self.put(self.fixed, o, t, stage, fixed * count * each)

    def put_home_bytes(self, o: int, t: Ints, name: str, count: Floats, *, network: bool = False) -> None:
        """Add the exchange of `count` bytes between a home and all owners."""
        if network and name in self.twins:
            seconds = np.where(self.unknown(o, t), 0.0, count) * home_network(self.model)
            self.home[t, o, self.twins[name]] += np.floor(seconds * PICO).astype(np.int64)
        each = self.sides[name][network].home[self.host_factors.home_host(name, network=network)]
        if each > 0.0:
            self._put_link("home", o, t, name, np.where(self.unknown(o, t), 0.0, count) * each, network)

    def _put_link(self, kind: str, o: int, t: Ints, name: str, seconds: Floats, network: bool) -> str:
        """Add seconds on links to `cost` or `home`, and return their stage."""
        stage = NETWORK_OF_STAGE[name] if network else name
        to = self.cost if kind == "cost" else self.home
        # A host may have few single pieces, so their links inside hosts are no part of the home's side.
        put = self.put(to, o, t, stage, seconds, at_home=not network and self.options[o].width > 1)
        if self.options[o].width == 1:
            self.host_factors.links[kind][self.stage(stage)] += put
        return stage


def _by_option(shape: tuple[int, int, int]) -> Ints:
    """Return zeros [T, O, n] in which the tables of one option and one number are adjacent, as they are filled in."""
    tables, options, numbers = shape
    return np.zeros((options, numbers, tables), np.int64).transpose(2, 0, 1)
