"""`price`: seconds of each part of a step on each rank, and bytes in each memory tier, for any tilings.

Nouns
  part     a kind of work in a step, such as "lookup"; PARTS lists them in the order of a step
  piece    one rectangle of a table on one rank, its owner;  home: a rank whose batch the owner serves

Amounts come from `Travel` (bytes that the runtime sends) and `Workload` (distinct rows), seconds from `Rates`. Formulas
with units: docs/planner-cost.md.

Legend: T tables, R = W ranks, P present bags, N ids, U distinct rows, q share of a table's traffic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilerec.planner.cost.model import (
    COUNTS_BYTES,
    HOST,
    KEY_BYTES,
    NETWORK_STAGES,
    STAGE_OF_NETWORK,
    STAGES,
    Copied,
    Model,
    Replicas,
)
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.travel import Travel
from tilerec.planner.cost.workload import Ints
from tilerec.spec.tile import Tile, Tiling

PARTS = (
    "route", "header", "ids", "lookup", "rows in host", "rows", "combine", "gather", "gradients", "gradients in host",
    "replicas", "row sums", "update", "overhead",
)  # fmt: skip
STAGE_OF_PART = {
    "route": 0, "header": 0, "ids": 0, "overhead": 0, "lookup": 1, "rows in host": 2, "rows": 2, "combine": 3,
    "gather": 3, "gradients": 3, "gradients in host": 3, "replicas": 4, "row sums": 4, "update": 4,
}  # fmt: skip
NETWORK_OF = {
    "header": NETWORK_STAGES[0], "ids": NETWORK_STAGES[0], "rows": NETWORK_STAGES[1], "gradients": NETWORK_STAGES[2],
}  # fmt: skip


@dataclass(frozen=True)
class Price:
    """The price of a plan.

    Args:
        parts: [R] seconds, for each of PARTS.
        network: [R] seconds on the network card, for each of NETWORK_STAGES. If the ranks of a host share a card, each
            is a stage of its own, equal on these ranks.
        calls: seconds of fixed costs of collectives.
        memory: [R, 2] bytes of device and host memory.
        sent: [R] bytes that a rank sends to others, by name of the traffic.
        between_hosts: the part of `sent` that leaves the host.
        names: of the stages. tier: index of the memory that holds tables.
    """

    parts: Mapping[str, Floats]
    network: Mapping[str, Floats]
    calls: float
    memory: Ints
    sent: Mapping[str, Floats]
    between_hosts: Mapping[str, Floats]
    names: tuple[str, ...]
    tier: int

    @property
    def stages(self) -> dict[str, Floats]:
        """[R] seconds of each stage."""
        found: dict[str, Floats] = {name: np.zeros(len(self.memory)) for name in self.names}
        for name, stage in self.stage_of.items():
            found[stage] = found[stage] + (self.parts[name] if name in self.parts else self.network[name])
        return found

    @property
    def stage_of(self) -> dict[str, str]:
        """The stage of each of PARTS and NETWORK_STAGES."""
        found = {name: STAGES[stage] for name, stage in STAGE_OF_PART.items()}
        return found | {name: name if name in self.names else stage for name, stage in STAGE_OF_NETWORK.items()}

    @property
    def seconds(self) -> float:
        """Seconds of a step: the sum over stages of the slowest rank's seconds, and the fixed costs of collectives."""
        return sum(float(s.max()) for s in self.stages.values()) + self.calls


def price(tilings: Sequence[Tiling], model: Model) -> Price:
    """Return the price of tilings, in the order of `model.workload.names`."""
    return _Pricing(tilings, model.of_tilings(tilings)).result()


class _Pricing:
    """Adds up seconds and bytes. parts, network: as in `Price`. memory, in_host: [R] bytes."""

    def __init__(self, tilings: Sequence[Tiling], model: Model) -> None:
        self.model, self.work, self.rates = model, model.workload, model.rates
        self.ranks = model.ranks
        self.travel = Travel(tilings, model)
        self.parts = {name: np.zeros(self.ranks) for name in PARTS}
        self.network = {name: np.zeros(self.ranks) for name in NETWORK_STAGES}
        self.memory, self.in_host = np.zeros(self.ranks), np.zeros(self.ranks)
        self.calls = self.travel.calls
        self._links()
        self._lookups()
        self._pieces()
        self._homes()
        self._proxies()
        self._replicas()
        self._row_sums(tilings)

    def result(self) -> Price:
        travel = self.travel
        memory = np.zeros((self.ranks, 2), np.int64)
        memory[:, HOST] = np.ceil(self.in_host).astype(np.int64)
        memory[:, self.model.tier] += np.ceil(self.memory).astype(np.int64)
        far = {name: travel.line(travel.far, name) for name in travel.sent}
        calls = self.calls * self.model.call * self.work.collections
        model = self.model
        return Price(self.parts, self.network, calls, memory, travel.sent, far, model.stages, model.tier)

    # ---------------------------------------------------------------------------------------------- links

    def _links(self) -> None:
        travel = self.travel
        for name, sent in travel.sent.items():
            far, received = travel.line(travel.far, name), travel.line(travel.received, name)
            far_received = travel.line(travel.far_received, name)
            self.parts[name] += self.rates.exchanged(sent - far, received - far_received)
            if name in NETWORK_OF:
                self.network[NETWORK_OF[name]] += self._between_hosts(far, far_received)

    def _between_hosts(self, sent: Floats, received: Floats) -> Floats:
        """Return [R] seconds of an exchange between hosts. Ranks that share a card take the time of their mean."""
        if self.model.topology.nic == "host":
            sent, received = self._mean_of_host(sent), self._mean_of_host(received)
        return self.rates.exchanged(sent, received, network=True)

    def _mean_of_host(self, values: Floats) -> Floats:
        host = self.travel.host
        mean: Floats = np.bincount(host, values)[host] / self.travel.on_host
        return mean

    # ---------------------------------------------------------------------------------------------- owners

    def _lookups(self) -> None:
        """Add the lookups of owners, as if all rows were in the processor's cache, and their buffers."""
        travel, model = self.travel, self.model
        p, layout, homes = travel.e_part, travel.layout, travel.e_homes
        ids, bags = travel.of_homes(travel.N, travel.more_N), travel.of_homes(travel.P, travel.more_P)
        element = self.work.element[travel.table[p]]
        seconds = np.zeros(len(p))
        for u in range(int(travel.units.max()) if len(travel.units) else 0):
            width = np.array([part.units[u].width if len(part.units) > u else 0 for part in layout.parts])[p]
            own = self.rates.lookup(ids, 0.0, bags, width, element)
            seconds = seconds + np.where(width > 0, own, 0.0)
        received = travel.of_homes(travel.payload, travel.more_payload)
        np.add.at(self.parts["lookup"], travel.e_owner, seconds + self.rates.copied(received))
        np.add.at(self.parts["overhead"], travel.e_owner, model.speeds.part * homes)
        buffers = bags * travel.width[p] * self.work.wide + ids * KEY_BYTES
        np.add.at(self.memory, travel.e_owner, received * (1 + model.depth) + buffers)

    def _pieces(self) -> None:
        """Add rows read from memory, updates and weights of each piece; the features of a table share its rows."""
        travel, work, model, rates = self.travel, self.work, self.model, self.rates
        parts = travel.layout.parts
        marks = [(int(t), p.r0, p.r1, p.owners) for t, p in zip(travel.table, parts, strict=True)]
        # Parts exist for each feature; a piece counts once, with the first feature of its table.
        first = {int(t): int(s) for s, t in reversed(list(enumerate(work.table.tolist())))}
        own = np.array([first[mark[0]] == part.slot for mark, part in zip(marks, parts, strict=True)], np.bool_)
        # One line for each owner of a part and each rectangle of the part.
        lines = np.flatnonzero(own[travel.e_part])
        units = travel.units[travel.e_part[lines]]
        nth = np.arange(int(units.sum())) - np.repeat(np.cumsum(units) - units, units)
        lines = np.repeat(lines, units)
        part, owner = travel.e_part[lines], travel.e_owner[lines]
        before = np.cumsum(travel.units) - travel.units
        widths = np.array([unit.width for part in parts for unit in part.units], np.float64)
        width = widths[before[part] + nth]
        table, share = travel.table[part], travel.row_share[part]
        r0, r1 = (np.array([mark[i] for mark in marks], np.int64)[part] for i in (1, 2))
        reads = travel.e_homes[lines]
        ids, present = (count[lines] for count in self._of_features(marks))
        copies = np.array([len(part.owners) for part in parts])[part]
        element = work.element[table]
        read = np.zeros(len(lines))
        for count in sorted(set(reads.tolist())):
            if count:
                own = reads == count
                read[own] = model.seen(count).between(table[own], r0[own], r1[own])
        row = width * element / 4.0
        dearer = np.maximum(rates.at("lookup_far", row) - rates.at("lookup_near", row), 0.0)
        np.add.at(self.parts["lookup"], owner, model.lookup_far(table, read) * dearer)
        cached = work.cached[table] & (r0 < work.rows[table])  # copies of hot rows are on the device
        if cached.any():
            moved = np.where(cached, model.fetched(table, model.missed_in(table, r0, r1), width), 0.0)
            np.add.at(self.parts["lookup"], owner, moved)
        # Copies are updated with the gradients of all ranks: see `_replicas`.
        distinct = model.seen(self.ranks).between(table, r0, r1)
        update = rates.update(
            ids, present, distinct, model.update_far(distinct), width, element,
            work.cell_state[table] * work.attached[table], work.row_state[table],
        )  # fmt: skip
        rows = np.rint(share * work.rows[table])  # whole rows, since cache lines come in sets
        dense = np.where(work.attached[table], 0.0, rates.copied(3.0 * rows * width * element))
        np.add.at(self.parts["update"], owner, np.where(copies > 1, 0.0, update) + dense)
        if work.hot is not None:
            there = (r0 < work.rows[table]) & ~cached  # a step writes no hot row to host memory
            self._write_back(table, owner, np.where(there, share * (width / work.dim[table]), 0.0))
        weights = model.weights(table, rows, width)
        np.add.at(self.in_host, owner, np.where(cached, model.in_host(table, weights), 0.0))
        np.add.at(self.memory, owner, np.where(cached, model.lines(table, rows, width, distinct), weights))

    def _write_back(self, table: Ints, owner: Ints, part: Floats) -> None:
        """Add the copies of updated hot rows to their places. part: [n] of a table's cells, in pieces of owners."""
        rows = self.work.rows[table]
        assert self.work.hot is not None
        head = self.model.seen(self.ranks).between(table, rows, rows + self.work.hot.rows[table])
        np.add.at(self.parts["update"], owner, np.where(head > 0.0, self.model.write_back(table, head * part), 0.0))

    def _of_features(self, marks: list[tuple[int, int, int, tuple[int, ...]]]) -> tuple[Floats, Floats]:
        """Return [entries] ids and bags that an owner reads from a piece, with all features at the first one's entry.

        Args:
            marks: [K] equal for the parts of one piece.
        """
        travel = self.travel
        first: dict[tuple[int, int, int, tuple[int, ...]], int] = {}
        begin = np.searchsorted(travel.e_part, np.arange(len(marks)))
        of_piece = begin[np.array([first.setdefault(mark, p) for p, mark in enumerate(marks)], np.int64)]
        entry = np.arange(len(travel.e_part))
        to = of_piece[travel.e_part] + entry - begin[travel.e_part]
        ids, bags = (
            np.bincount(to, travel.of_homes(usual, more), len(entry)).astype(np.float64)
            for usual, more in ((travel.N, travel.more_N), (travel.P, travel.more_P))
        )
        return ids, bags

    # ---------------------------------------------------------------------------------------------- homes

    def _homes(self) -> None:
        """Add the work of every home: routing its ids, and placing rows into its output."""
        travel, work, rates, model = self.travel, self.work, self.rates, self.model
        routes = np.bincount([route.slot for route in travel.layout.routes], minlength=len(work.bags))
        ids = float(sum((work.bags * work.ids_per_bag * routes).tolist()))
        payload = np.full(self.ranks, float(sum(travel.payload.tolist())))
        held = np.full(self.ranks, float(sum((travel.P * travel.width).tolist())))
        other = travel.unusual
        np.add.at(payload, other.home, travel.more_payload[other.part])
        np.add.at(held, other.home, (travel.more_P * travel.width)[other.part])
        self.parts["route"] += ids * model.speeds.route + rates.copied(2.0 * payload)
        if work.hot is not None:
            self.parts["route"] += float(sum(model.find_hot(np.flatnonzero(work.hot.rows)).tolist()))
        bookkeeping = model.speeds.part * len(travel.layout.parts) + model.speeds.step * work.collections
        self.parts["overhead"] += bookkeeping
        rows = np.where(travel.merged, 0.0, travel.items)
        for name, rate in (("combine", "place"), ("gather", "pick")):
            self.parts[name] += float(sum((rows * rates.at(rate, travel.width)).tolist()))
        output = float(sum((work.per_table(work.bags) * work.dim * work.wide).tolist()))
        # Some bags may have no row, so the output is set to zeros first.
        partial, every = travel.row_share < 1.0, bool(np.any(work.ids_per_bag < 1.0))
        filled = np.full(self.ranks, every or bool(np.any(partial & ~travel.once)))
        filled[other.home[partial[other.part] & travel.once[other.part]]] = True
        self.parts["combine"] += np.where(filled, rates.copied(0.5 * output), 0.0)
        self.memory += 2.0 * output + held * work.wide
        self.memory += payload * (1 + model.depth)

    def _proxies(self) -> None:
        """Add the sums inside hosts, at the proxies and at the homes."""
        travel, rates = self.travel, self.rates
        if not travel.proxied:
            return
        own = np.where(travel.merged, travel.items, 0.0)
        on_host = travel.host[travel.first_owner]
        hosts = int(travel.host.max()) + 1
        turns = (("combine", "rows in host", "place"), ("gather", "gradients in host", "pick"))
        for at_home, at_proxy, rate in turns:
            near: Floats = np.bincount(on_host, own * rates.at(rate, travel.width), hosts).astype(np.float64)
            self.parts[at_home] += near[travel.host]
            for group in travel.proxied:
                seconds = rates.at(rate, group.width)
                added, written = (float(sum((bags * seconds).tolist())) for bags in (group.members, group.written))
                self.parts[at_proxy] += group.turns * added
                self.parts[at_home] += np.where(group.homes, written, 0.0)

    # ---------------------------------------------------------------------------------------------- peers

    def _replicas(self) -> None:
        """Add the exchange of gradients between the copies of a tile, and their updates."""
        travel = self.travel
        tiles = [(t, tile) for t, tile in travel.layout.rectangles if len(tile.owners) > 1]
        if not tiles:
            return
        # Bags and ids of a mean home in each part.
        of_parts = [
            (np.bincount(travel.e_part, travel.of_homes(usual, more), len(usual)) / self.ranks).tolist()
            for usual, more in ((travel.P, travel.more_P), (travel.N, travel.more_N))
        ]
        read: dict[tuple[int, int, int, tuple[int, ...]], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for t, part, bags, ids in zip(travel.table.tolist(), travel.layout.parts, *of_parts, strict=True):
            if len(part.owners) > 1:
                mark = (t, part.r0, part.r1, part.owners)
                read[mark] = read[mark][0] + bags, read[mark][1] + ids
        reads = np.array([read[t, tile.r0, tile.r1, tile.owners] for t, tile in tiles])
        marks = np.array([(t, tile.r0, tile.r1, len(tile.owners)) for t, tile in tiles], np.int64).T
        width = np.array([float(tile.c1 - tile.c0) for _, tile in tiles])
        copied = Copied(marks[0], marks[1], marks[2], marks[3], width, reads[:, 0], reads[:, 1])
        replicas = Replicas(self.model, copied)
        forms = replicas.form
        work, t = self.work, copied.table
        updates = self.rates.update(
            replicas.ids, replicas.bags, replicas.distinct, self.model.update_far(replicas.distinct), copied.width,
            work.element[t], work.cell_state[t] * work.attached[t], work.row_state[t],
        )  # fmt: skip
        for i, ((_, tile), update) in enumerate(zip(tiles, updates.tolist(), strict=True)):
            self._copies(tile, replicas, i, update)
        in_shares = bool(np.any(forms == 4))
        self.calls += int(np.any(forms != 3)) + 2 * int(in_shares or np.any(forms < 2)) + 4 * int(in_shares)
        self.calls += int(np.any((forms == 2) | (forms == 3)))

    def _copies(self, tile: Tile, form: Replicas, i: int, update: float) -> None:
        """Add the exchange and the updates of the copies of one tile, the i-th of `form`.

        Args:
            update: seconds of the update of one copy.
        """
        travel = self.travel
        owners, near = self._ends_of(tile.owners)
        others = len(tile.owners) - 1.0
        reduced = float(form.reduced[i])
        ring = 2.0 * reduced * others / (others + 1.0)
        sent = float(form.sent[i]) * others + ring
        close = near / others
        near_bytes = sent * close
        link = self.rates.exchanged(near_bytes, near_bytes)
        self.parts["replicas"][owners] += link + float(form.seconds[i])
        away = np.zeros(self.ranks)
        away[owners] = sent * (1.0 - close)
        self.network[NETWORK_STAGES[3]] += self._between_hosts(away, away)
        self.parts["update"][owners] += update
        self.memory[owners] += 2.0 * (sent - ring + reduced)
        bytes_of = {
            "replica counts": COUNTS_BYTES,
            "replica rows": float(form.row_numbers[i]),
            "replica ids": float(form.numbers[i]),
            "replica gradients": float(form.gradients[i]),
        }
        lines = {name: value * others for name, value in bytes_of.items()}
        part = others / (others + 1.0)
        if form.form[i] == 3:
            lines = {"dense gradients": ring}
        elif form.form[i] == 4:
            lines["replica shares"] = COUNTS_BYTES * others
            lines["replica ids"] += float(form.share_head[i]) * others + float(form.shared_numbers[i]) * part
            lines["replica gradients"] += float(form.shared_gradients[i]) * part
        elif form.form[i] == 2:
            lines["replica gradients, dense"] = ring
        for name, value in lines.items():
            travel.line(travel.sent, name)[owners] += value
            travel.line(travel.far, name)[owners] += value * (1.0 - close)

    def _ends_of(self, owners: tuple[int, ...]) -> tuple[Any, Floats]:
        """Return an index of the owners of copies, and [owners] the others on the same host.

        Most are copies on every rank. A slice needs a third of the time of a thousand indices.
        """
        if len(owners) == self.ranks:
            return slice(None), self.travel.on_host - 1.0
        own = np.array(owners)
        return own, np.bincount(self.travel.host[own])[self.travel.host[own]] - 1.0

    def _row_sums(self, tilings: Sequence[Tiling]) -> None:
        """Add the row sums that column blocks exchange, for row rules with sums over whole rows."""
        work, model, speeds, travel = self.work, self.model, self.model.speeds, self.travel
        talks, near, far = 0, np.zeros((2, self.ranks)), np.zeros((2, self.ranks))  # bytes sent, received
        for t in np.flatnonzero(work.talks).tolist():
            tiling = tilings[t]
            if len({block.owners for block in tiling.blocks}) < 2:
                continue
            talks = max(talks, int(work.talks[t]))
            row_bytes = 4.0 * (float(work.sums[t]) + 1.0)  # + 1: a flag that the row is finite
            tiles = tiling.tiles()
            holders: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
            for tile in tiles:
                holders[tile.r0, tile.r1].update(tile.owners)
            for tile in tiles:
                distinct = float(model.seen(self.ranks).between(t, tile.r0, tile.r1))
                copied = float(self.rates.copied(6.0 * distinct * (tile.c1 - tile.c0) * work.wide))
                for owner in tile.owners:
                    others = np.array(sorted(holders[tile.r0, tile.r1].difference(tile.owners)), np.int64)
                    away = travel.host[others] != travel.host[owner]
                    for lines, there in ((near, others[~away]), (far, others[away])):
                        lines[0, owner] += len(there) * distinct * row_bytes
                        lines[1, there] += distinct * row_bytes
                    self.parts["row sums"][owner] += speeds.row_sum + copied
        if talks:
            self.parts["row sums"] += self.rates.exchanged(near[0], near[1])
            self.network[NETWORK_STAGES[3]] += self._between_hosts(far[0], far[1])
            travel.line(travel.sent, "row sums")[:] += near[0] + far[0]
            travel.line(travel.far, "row sums")[:] += far[0]
        self.calls += talks
