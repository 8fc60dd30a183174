"""`Travel`: bags, ids and bytes that move between ranks in a step of given tilings.

Nouns
  home     the rank whose batch contains an id or a bag;  owner: a rank that reads a part for homes
  near     home and owner are on one host;  far: on two hosts
  entry    a pair (part of the layout, owner), with the number of homes that the owner reads for
  proxied  row parts on one host, whose rows a proxy adds there before they cross to homes on other hosts
  once     a home sends each distinct id of a feature once; unusual: homes that decide otherwise than most of them

All counts follow from the layout that the runtime compiles (sharding/layout.py). The names of predicted bytes are those
that comms/traffic.py counts. Formulas: docs/planner-cost.md.

Legend: R ranks, K parts, P present bags, N ids, q share of a table's traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.once import sent_once
from tilerec.planner.cost.portable import Floats, missed
from tilerec.planner.cost.workload import Bools, Ints
from tilerec.sharding.layout import SharedLayout, SlotRead, TableLayout, reader
from tilerec.spec.tile import Tiling


class Proxied(NamedTuple):
    """Sums inside one host with the same members, G of them.

    Args:
        homes: [R] True for homes on other hosts.
        turns: [R] number of homes for which each rank is the proxy.
        width: [G] columns. members: [G] bags of all members. written: [G] bags of a home with a row of their sum.
    """

    homes: Bools
    turns: Floats
    width: Floats
    members: Floats
    written: Floats


class Travel:
    """Counts and bytes of a step.

    sent, received: by name of the traffic, [R] bytes. far, far_received: those of them that leave the host, or come
    from another host. calls: number of collectives. By part, [K]: q, row_share, width, units; once; P, N, payload of a
    usual home, and more_P, more_N, more_payload of an unusual one; items: bags, or ids of a sequence, to write at home;
    merged: its rows are proxied; single: it has one owner. By entry: e_part, e_owner, e_homes, and e_near, e_far,
    e_own: homes read for on the same host, on other hosts, and itself.
    """

    def __init__(self, tilings: Sequence[Tiling], model: Model) -> None:
        self.model, self.work = model, model.workload
        work, topology = self.work, model.topology
        self.ranks = model.ranks
        self.sent: dict[str, Floats] = {}
        self.far: dict[str, Floats] = {}
        self.received: dict[str, Floats] = {}
        self.far_received: dict[str, Floats] = {}
        self.proxied: list[Proxied] = []
        self.calls = 1
        host = np.empty(self.ranks, np.int64)
        for h, ranks in enumerate(topology.host_ranks):
            host[list(ranks)] = h
        self.host = host
        self.on_host = np.bincount(host)[host].astype(np.float64)
        tables = [TableLayout(t.name, tiling, t.fan_in, t.wire) for t, tiling in zip(work.tables, tilings, strict=True)]
        slots = [SlotRead(int(t), "") for t in work.table]
        self.layout = SharedLayout(tables, slots, topology)
        self._count_parts(self.layout)
        self._count_merges(self.layout)
        self._exchange()

    # ---------------------------------------------------------------------------------------------- who reads what

    def _count_parts(self, layout: SharedLayout) -> None:
        """Compute the arrays over parts and over entries."""
        work = self.work
        parts = layout.parts
        self.slot = np.array([p.slot for p in parts], np.int64)
        self.table = work.table[self.slot] if len(parts) else np.zeros(0, np.int64)
        r0 = np.array([p.r0 for p in parts], np.int64)
        r1 = np.array([p.r1 for p in parts], np.int64)
        self.q = work.share(self.table, r0, r1)
        self.row_share = (r1 - r0) / work.rows[self.table]
        self.weighted = work.weighted[self.slot]
        self.id_bytes = 8.0 if np.any(r1 - r0 >= 1 << 31) else 4.0
        self.width = np.array([sum(u.width for u in p.units) for p in parts], np.float64)
        self.units = np.array([len(p.units) for p in parts], np.int64)
        self.e_part, self.e_owner, near, far, own = self._entries(layout)
        self.e_near, self.e_far, self.e_own = (x.astype(np.float64) for x in (near, far, own))
        self.e_homes = self.e_near + self.e_far + self.e_own
        length, bags = work.ids_per_bag[self.slot], work.bags[self.slot]
        self.items = bags * (1.0 - missed(self.q, length))
        each = self.items, bags * length * self.q
        cells = (r1 - r0) * self.width
        usual, self.unusual = sent_once(self.model, layout, self.e_part, self.e_owner, self.slot, cells)
        if np.any(usual) or len(self.unusual.home):
            distinct = self.model.seen_by_feature.between(self.slot, r0, r1)
            self.once = usual[self.slot]
            other = [np.where(self.once, own, distinct) for own in each]
            each_or_once = [np.where(self.once, distinct, own) for own in each]
        else:
            self.once, other, each_or_once = np.zeros(len(parts), np.bool_), list(each), list(each)
        self.P, self.N = each_or_once
        self.lengths, self.payload = self._payload(self.P, self.N)
        # What homes that decide otherwise add to the counts of a part.
        self.more_P, self.more_N = other[0] - self.P, other[1] - self.N
        self.more_payload = self._payload(*other)[1] - self.payload
        self.single = np.array([len(p.owners) == 1 for p in parts], np.bool_)
        self.first_owner = np.array([part.owners[0] for part in parts], np.int64)

    def _payload(self, P: Floats, N: Floats) -> tuple[Floats, Floats]:
        """Return [K] lengths to send, and bytes of ids, weights and lengths."""
        lengths = np.where(N - P > 0.5, P, 0.0)
        return lengths, N * (self.id_bytes + self.work.wide * self.weighted) + 4.0 * lengths

    def of_homes(self, usual: Floats, more: Floats) -> Floats:
        """Return [entries] the sums over the homes that an owner reads for, of a count [K] of each home."""
        found: Floats = self.e_homes * usual[self.e_part]
        np.add.at(found, self.unusual.entry, more[self.unusual.part])
        return found

    def _entries(self, layout: SharedLayout) -> tuple[Ints, ...]:
        """Return, by entry: part, owner, and the number of near, far and own homes that the owner reads for."""
        topology, ranks = self.model.topology, self.ranks
        everyone = tuple(range(ranks))
        count = np.array([len(part.owners) for part in layout.parts], np.int64)
        part = np.repeat(np.arange(len(count)), count)
        owner = np.fromiter(chain.from_iterable(p.owners for p in layout.parts), np.int64, len(part))
        alone = (count == 1)[part]
        near = np.where(alone, self.on_host[owner].astype(np.int64) - 1, 0)
        far = np.where(alone, ranks - 1 - near, 0)
        own = np.ones(len(part), np.int64)
        before = np.cumsum(count) - count
        # A copy on every rank serves its own home only; copies on some ranks divide the homes among them.
        for p in np.flatnonzero((count > 1) & (count < ranks)).tolist():
            owners = layout.parts[p].owners
            homes = np.array([reader(owners, home, topology) for home in everyone])
            for i, o in enumerate(owners, int(before[p])):
                read = np.flatnonzero(homes == o)
                near[i] = int((self.host[read] == self.host[o]).sum()) - 1  # itself
                far[i] = int((self.host[read] != self.host[o]).sum())
        return part, owner, near, far, own

    def _count_merges(self, layout: SharedLayout) -> None:
        """Collect the sums inside hosts, and mark the parts of their members."""
        self.merges = layout.groups()
        self.merged = np.zeros(len(layout.parts), np.bool_)
        self.merged[list(chain.from_iterable(group.parts for group in self.merges))] = True

    # ---------------------------------------------------------------------------------------------- what travels

    def line(self, lines: dict[str, Floats], name: str) -> Floats:
        """Return the [R] bytes of a name, to add to; zeros at first."""
        return lines.setdefault(name, np.zeros(self.ranks))

    def _to_owners(self, name: str, count: Floats, more: Floats | None = None) -> None:
        """Add the bytes that homes send to the owners of each part, except to themselves.

        Args:
            count: [K] of each home. more: [K] what homes that decide otherwise send besides.
        """
        owner, away, home, home_away = self._ends(count, more, np.zeros(len(count), np.bool_))
        ends = (self.sent, self.far, self.received, self.far_received)
        for lines, value in zip(ends, (home, home_away, owner, away), strict=True):
            self.line(lines, name)[:] += value

    def _ends(self, count: Floats, more: Floats | None, proxied: Bools) -> tuple[Floats, ...]:
        """Return [R] bytes of owners and of homes, each in all and with other hosts; arguments as of `_to_owners`.

        Args:
            proxied: [K] parts that exchange nothing with homes on other hosts.
        """
        each, far = count[self.e_part], np.where(proxied[self.e_part], 0.0, self.e_far)
        owner: Floats = np.bincount(self.e_owner, (self.e_near + far) * each, self.ranks).astype(np.float64)
        away: Floats = np.bincount(self.e_owner, far * each, self.ranks).astype(np.float64)
        home, home_away = self._home_side(~proxied, count)
        near, near_away = self._home_side(proxied, count)
        home = home + near - near_away
        other = self.unusual
        if more is not None and len(other.home):
            abroad = self.host[other.owner] != self.host[other.home]
            travels = (other.owner != other.home) & ~(abroad & proxied[other.part])
            for own, theirs, those in ((owner, home, travels), (away, home_away, travels & abroad)):
                value = np.where(those, more[other.part], 0.0)
                np.add.at(own, other.owner, value)
                np.add.at(theirs, other.home, value)
        return owner, away, home, home_away

    def _home_side(self, mask: Any, count: Floats) -> tuple[Floats, Floats]:
        """Return [R] bytes between a home and other ranks, and other hosts: `count` for each part in `mask`."""
        single = mask & self.single
        owner = self.first_owner
        weights = np.where(single, count, 0.0)
        by_owner: Floats = np.bincount(owner, weights, self.ranks).astype(np.float64)
        by_host: Floats = np.bincount(self.host[owner], weights, int(self.host.max()) + 1).astype(np.float64)
        others = float(sum(by_owner.tolist())) - by_owner
        away = (float(sum(by_host.tolist())) - by_host)[self.host]
        for p in np.flatnonzero(mask & ~self.single).tolist():
            owners = self.layout.parts[p].owners
            if len(owners) == self.ranks:
                continue
            for home in range(self.ranks):
                o = reader(owners, home, self.model.topology)
                others[home] += count[p] * (o != home)
                away[home] += count[p] * (self.host[o] != self.host[home])
        return others, away

    def _exchange(self) -> None:
        """Compute the bytes of header, ids, rows and gradients."""
        self._to_owners("header", np.full(len(self.single), 8.0))
        for lines, others in ((self.sent, self.far), (self.received, self.far_received)):
            lines["header"] += 4.0 * (self.ranks - 1)
            others["header"] += 4.0 * (self.ranks - self.on_host)
        if self.layout.alone:
            return
        self.calls += 3
        self._to_owners("ids", self.payload, self.more_payload)
        for name, backward in (("rows", False), ("gradients", True)):
            row = self._row_bytes(backward=backward)
            owner, away, home, home_away = self._ends(row * self.P, row * self.more_P, self.merged)
            ends = (self.sent, self.far, self.received, self.far_received)
            own = (owner, away, home, home_away) if not backward else (home, home_away, owner, away)
            for lines, value in zip(ends, own, strict=True):
                lines[name] = value
        self._merge_bytes()

    def _row_bytes(self, *, backward: bool) -> Floats:
        """Return [K] bytes on the wire of one bag of a part, over all its units."""
        formats = self.work.backward if backward else self.work.forward
        cell = np.where(formats[0] == 4, self.work.wide, formats[0])[self.table]
        return cell * self.width + formats[1][self.table] * self.units

    def _merge_bytes(self) -> None:
        """Add the bytes of sums inside hosts: from members to the proxy, from the proxy to the home, and back."""
        if not self.merges:
            return
        self.calls += 2
        own: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for g, group in enumerate(self.merges):
            own.setdefault((group.host, tuple(sorted(set(group.owners)))), []).append(g)
        part = np.fromiter(chain.from_iterable(group.parts for group in self.merges), np.int64)
        size = np.array([len(group.parts) for group in self.merges], np.int64)
        begin = np.cumsum(size) - size
        of, first = np.repeat(np.arange(len(size)), size), part[begin]

        def total(values: Floats) -> Floats:
            """Return the sums of values of members, in their order, by sum."""
            return np.bincount(of, values, len(size)).astype(np.float64)

        slot, P = self.slot[first], self.P[part]
        q = np.minimum(total(self.q[part]), 1.0)
        members, written = total(P), self.work.bags[slot] * (1.0 - missed(q, self.work.ids_per_bag[slot]))
        union = np.where(self.once[first], members, written)
        forward, backward = (self._row_bytes(backward=way)[first] * union for way in (False, True))
        # Positions of a member's bags in the sum, if the sum has more bags.
        positions = 4.0 * total(np.where(union[of] - P > 0.5, P, 0.0))
        inner = P * self.width[first][of] * float(self.work.wide)
        counts = np.stack([positions, 4.0 * (1.0 + size), backward, forward], axis=1)
        for (host, owners), groups in own.items():
            homes = self.host != host
            turns, width = self._turns(host, owners), self.width[first[groups]]
            proxied = Proxied(homes, turns, width, members[groups], written[groups])
            self.proxied.append(proxied)
            self._add_sums(proxied, *np.add.accumulate(counts[groups], axis=0)[-1].tolist())
            some = np.concatenate([np.arange(begin[g], begin[g] + size[g]) for g in groups])
            held = np.bincount(self.first_owner[part[some]], inner[some], self.ranks).astype(np.float64)
            self._add_inside(np.array(owners), held, turns)

    def _turns(self, host: int, owners: tuple[int, ...]) -> Floats:
        """Return [R] the number of homes on other hosts for which each rank is the proxy, as by `Topology.turn`."""
        every = np.arange(self.ranks)
        turn = every - np.searchsorted(np.sort(self.model.topology.ranks_of(host)), every)
        proxies = np.array(owners)[turn % len(owners)]
        return np.bincount(proxies[self.host != host], minlength=self.ranks).astype(np.float64)

    def _add_sums(self, proxied: Proxied, positions: float, head: float, backward: float, forward: float) -> None:
        """Add the bytes between proxies and homes.

        A home sends positions, a header and gradients to the proxy, which sends rows to the home.
        """
        homes, turns = proxied.homes, proxied.turns
        for name, value in (("ids", positions), ("header", head), ("gradients", backward)):
            for sent in (self.sent[name], self.far[name]):
                sent[homes] += value
            for received in (self.received[name], self.far_received[name]):
                received += value * turns
        for sent in (self.sent["rows"], self.far["rows"]):
            sent += forward * turns
        for received in (self.received["rows"], self.far_received["rows"]):
            received[homes] += forward

    def _add_inside(self, owners: Ints, held: Floats, turns: Floats) -> None:
        """Add the bytes between members and proxies of a host.

        Args:
            held: [R] bytes that a member sends for a home whose proxy is another member.
        """
        to_others = held[owners] * (float(sum(turns[owners].tolist())) - turns[owners])
        of_others = turns[owners] * (float(sum(held[owners].tolist())) - held[owners])
        for name, ends in (("rows in host", (to_others, of_others)), ("gradients in host", (of_others, to_others))):
            for lines, value in zip((self.sent, self.received), ends, strict=True):
                self.line(lines, name)[owners] += value
